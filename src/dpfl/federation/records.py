"""What every other room calls data: records, a data set before it is shared out, and a federation after."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_EXAMPLES = 8  # records that are made up where a model must be tried and none are public

Transform = Callable[[Tensor], Tensor]  # of the features of some records: a preprocessing


@dataclass(frozen=True)
class Separate:
    """A preprocessing of dpfl's own, which makes each record's features of that record alone, whatever the others are.

    So it may be handed all of them at once. Who wraps another in it vouches for that, and nothing checks it.
    """

    transform: Transform

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features of these records."""
        return self.transform(x)


@dataclass(frozen=True)
class Records:
    """Rows of features and targets that belong together; in print they are counted and not shown."""

    x: Tensor  # [n, ...] float
    y: Tensor  # [n] int64 class labels, or float targets

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return f"Records({len(self):,} of shape {list(self.x.shape[1:])})"

    def take(self, rows: Tensor) -> "Records":
        """Return the records at these positions (or under this mask)."""
        return Records(self.x[rows], self.y[rows])

    def to(self, device: torch.device) -> "Records":
        """Return the same records on `device`."""
        return Records(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Dataset:
    """A data set as it came: one pool to share out, and a test split for reporting only.

    `fit` learns a preprocessing (scaling, PCA, ...) from features that are public and returns it. It is handed the
    public validation split, never clients' data: statistics of private records would be an uncounted release. What it
    returns is shown one record [1, ...] at a time and must remember none of them.
    """

    name: str
    pool: Records
    test: Records
    classes: int | None  # None for regression, and for labels that are to be counted over public records
    source: str  # where it came from and how much of it there is, in one line
    groups: Tensor | None = field(
        default=None, repr=False
    )  # [n] the person behind each record of the pool (a FEMNIST writer)
    fit: Callable[[Tensor], Transform] | None = None
    raw: "tuple[Records, Records] | None" = field(
        default=None, repr=False
    )  # pool and test as people know them, where these were made into features already


@dataclass(frozen=True)
class Federation:
    """Clients with their private records, and two public splits that are apart from them and from each other.

    A private record that cannot be computed has features that are not finite (`federate` sees to that) and counts as
    zero wherever a clip promises something.
    """

    name: str
    clients: tuple[Records, ...]
    validation: Records  # public: decisions during training may look at it
    test: Records  # for reporting only
    classes: int | None
    source: str
    recipe: dict[str, Any] | None = None  # the arguments of `federate`; None where arrays were handed over
    # Each client's records, the validation and the test split as they were before a preprocessing was fitted, by which
    # a ledger knows people; None where they are that already.
    untouched: "Callable[[], tuple[Records, ...]] | None" = None
    names: tuple[str, ...] = ()  # of the clients, where they have any; numbers from 0 on otherwise
    site_tests: tuple[Records, ...] = ()  # each client's own test records, where `test` is made of them

    def __repr__(self) -> str:
        sizes = sorted({min(self.sizes), max(self.sizes)}) if self.clients else [0]
        held = " to ".join(f"{size:,}" for size in sizes)
        return (
            f"Federation({self.name!r}, {len(self.clients):,} clients of {held} records,"
            f" {len(self.validation):,} public, {len(self.test):,} to test on)"
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return how many records each client holds: public, since neighbours replace a record."""
        return tuple(len(records) for records in self.clients)

    def name_of(self, client: int) -> str:
        """Return what a client is called."""
        return self.names[client] if self.names else str(client)

    @property
    def example(self) -> Records:
        """Return records that may be looked at before training: public ones, or made-up ones where none are."""
        if len(self.validation):
            return self.validation
        if len(self.test) and not self.site_tests:
            return self.test
        numbers = math.prod(self.shape)
        waves = torch.sin(1.7 * torch.arange(_EXAMPLES * numbers)).view(_EXAMPLES, *self.shape)
        targets = torch.arange(_EXAMPLES) % (self.classes or _EXAMPLES)
        return Records(waves, targets.to(self.validation.y.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one record's features."""
        return tuple(self.validation.x.shape[1:])
