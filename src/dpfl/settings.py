"""Everything about a run but its system: one list, from which all others are made.

A field is a setting. Its name, type and default are the signature of `federate` and `train`, the key in a config and
the option of the command line; its help stands in `--help`, in `help(dpfl.train)` and in docs/commands.md. One that
came after results were kept has `added` in its metadata, and is left out of their keys at its default.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_type_hints

from dpfl.errors import BadInput, require_count, require_positive, suggestion
from dpfl.options import fit_fields, option_names
from dpfl.orders import Sampler
from dpfl.precision import Precision

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound="DataSettings | TrainSettings")


def about(help: str, *, metavar: str, compared: bool = False) -> dict[str, Any]:
    """Describe a setting. Runs that are compared must have the same `compared` ones."""
    return {"help": help, "metavar": metavar, "compared": compared}


SITES = "sites"  # what the data is called where a user's own sites hold it
EXISTING = ("heart",)  # data sets whose clients exist already
_DATA, _CLIENTS = "digits", 20
_SHARING_OUT = ("partition", "sizes", "share", "min_records", "validation_share")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which data, and how it is shared out among clients."""

    data: str = field(
        default=_DATA,
        metadata=about(
            "Data set: heart and digits (embedded), mnist, fashion-mnist, femnist, cifar10, adult or lending-club.",
            metavar="D", compared=True,
        ),
    )  # fmt: skip
    sites: str | tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "Sites that hold data of their own, in place of a data set: a folder with a file (CSV, Parquet or NPZ) for"
            " each, or the files.",
            metavar="PATH…", compared=True,
        )
        | {"added": "0.3"},
    )  # fmt: skip
    schema: str | None = field(
        default=None,
        metadata=about(
            "What the columns of the sites' files mean, and their public ranges; schema.toml beside them if left out.",
            metavar="FILE", compared=True,
        )
        | {"added": "0.3"},
    )  # fmt: skip
    public: str | None = field(
        default=None,
        metadata=about(
            "A file of public records in the form of the sites', for plans and for decisions during training.",
            metavar="FILE", compared=True,
        )
        | {"added": "0.3"},
    )  # fmt: skip
    clients: int | None = field(
        default=None,
        metadata=about(
            "How many clients hold the data: 20 if left out, or as many as there are sites.", metavar="N", compared=True
        ),
    )
    partition: str = field(
        default="iid",
        metadata=about(
            "How it is shared out: iid, dirichlet:ALPHA, classes:C, sorted, writer or writer-groups.",
            metavar="P",
            compared=True,
        ),
    )
    sizes: int | tuple[int, ...] | None = field(
        default=None,
        metadata=about(
            "Records a client: one number, or a list with one for each equal group of clients; all if left out.",
            metavar="N", compared=True,
        ),
    )  # fmt: skip
    share: float = field(
        default=1.0, metadata=about("The part of its records that each client uses.", metavar="A", compared=True)
    )
    min_records: int = field(
        default=10,
        metadata=about("Records of the smallest client that dirichlet may draw.", metavar="N", compared=True),
    )
    validation_share: float = field(
        default=0.1,
        metadata=about(
            "The public part of the data, for decisions during training; 0 for none. Sites have none.",
            metavar="A",
            compared=True,
        ),
    )
    test_share: float = field(
        default=0.2,
        metadata=about(
            "The part to test on, where the data has no test split of its own: of each site's records, where there are"
            " sites.",
            metavar="A",
            compared=True,
        ),
    )
    data_seed: int | None = field(
        default=None, metadata=about("For sharing out the data; the seed if left out.", metavar="S")
    )

    def __post_init__(self) -> None:
        if isinstance(self.sites, os.PathLike):  # from Python
            object.__setattr__(self, "sites", os.fspath(self.sites))
        fit_fields(self)
        if self.sites is not None:
            self._name_the_sites()
        elif self.data == SITES:
            raise BadInput(f"sites must be given where data is {SITES!r}, were left out; name a folder or files")
        elif self.schema is not None or self.public is not None:
            field_name = "schema" if self.schema is not None else "public"
            raise BadInput(f"{field_name} must come with sites, was given without any; add --sites FOLDER")
        elif self.clients is None and self.data not in EXISTING:
            object.__setattr__(self, "clients", _CLIENTS)
        if self.has_sites:
            self._require_nothing_shared_out()

    @property
    def has_sites(self) -> bool:
        """Tell whether clients exist already, so that no data is shared out."""
        return self.sites is not None or self.data in EXISTING

    def _name_the_sites(self) -> None:
        if self.data not in (SITES, _DATA):
            raise BadInput(f"data must be left out with sites, which are the data, was {self.data!r}; leave it out")
        object.__setattr__(self, "data", SITES)
        if isinstance(self.sites, str):
            object.__setattr__(self, "sites", (self.sites,))
        if not self.sites:
            raise BadInput("sites must name a folder or files, was an empty list; name some, or leave it out")

    def _require_nothing_shared_out(self) -> None:
        """Refuse what says how a pooled data set is shared out, where every record is at its site."""
        for name in _SHARING_OUT:
            default = next(one.default for one in fields(DataSettings) if one.name == name)
            if (value := getattr(self, name)) != default:
                way_out = "name a public file with --public" if name == "validation_share" else "leave it out"
                raise BadInput(
                    f"{name} must be left out where clients are sites with records of their own, which are not shared"
                    f" out, was {value!r}; {way_out}"
                )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What is trained, where, and who is charged."""

    model: str | None = field(
        default=None,
        metadata=about("Model by name; the one that fits the data if left out.", metavar="M", compared=True),
    )
    evaluate_every: int = field(
        default=1, metadata=about("Rounds between looks at the validation and the test split.", metavar="R")
    )
    backend: Literal["stacked", "reference"] = field(
        default="stacked",
        metadata=about(
            "How clients train: a whole cohort at once, or a plain loop over them.", metavar="stacked|reference"
        ),
    )
    draws: Literal["cohort", "client"] | None = field(
        default=None,
        metadata=about(
            "Who draws noise and batches: a cohort from one stream, or each client from its own; the law is the same."
            " What suits the backend if left out.",
            metavar="cohort|client",
        )
        | {"added": "0.2"},
    )
    paid_evaluation: float | None = field(
        default=None,
        metadata=about(
            "The ε that each site spends, besides, to count with noise how many of its own test records the model gets"
            " right; without it the sites' results are reported as they are, and are not private.",
            metavar="X",
        )
        | {"added": "0.3"},
    )
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=about("Where to train.", metavar="cpu|cuda"))
    precision: Precision = field(
        default="float32",
        metadata=about("tf32: a GPU multiplies faster, with ten bits of mantissa.", metavar="float32|tf32"),
    )
    seed: int | None = field(
        default=None,
        metadata=about(
            "Repeats the run bit for bit, noise included: for simulations; noise that nobody can repeat if left out.",
            metavar="S",
        ),
    )
    sampler: Sampler | None = field(
        default=None,
        metadata=about(
            "How noise is drawn: exactly, on a public grid, or fast, as suits simulations, where the last bits of an"
            " upload may tell what they hide. Exactly without a seed and fast with one if left out.",
            metavar="exact|fast",
        )
        | {"added": "0.3"},
    )
    ledger: str | None = field(
        default=None,
        metadata=about(
            "An existing ledger to charge, which many runs share; one in the run folder if left out.", metavar="FILE"
        ),
    )

    def __post_init__(self) -> None:
        if isinstance(self.ledger, os.PathLike):  # from Python
            object.__setattr__(self, "ledger", os.fspath(self.ledger))
        fit_fields(self)
        require_count("evaluate_every", self.evaluate_every, "use 1 to look after every round")
        if self.paid_evaluation is not None:
            require_positive("paid_evaluation", self.paid_evaluation, "spend 0.5, say, or leave it out")


@dataclass(frozen=True, kw_only=True)
class Settings(TrainSettings, DataSettings):
    """Both, as a config has them; its text begins with the data."""

    def __post_init__(self) -> None:
        DataSettings.__post_init__(self)
        TrainSettings.__post_init__(self)

    @property
    def of_data(self) -> DataSettings:
        """Return the part that shares the data out, with the seed where it has none of its own."""
        return replace(_part(self, DataSettings), data_seed=self.seed if self.data_seed is None else self.data_seed)

    @property
    def of_training(self) -> TrainSettings:
        """Return the part that trains."""
        return _part(self, TrainSettings)


def _part(settings: Settings, kind: type[K]) -> K:
    return kind(**{name: getattr(settings, name) for name in option_names(kind)})


COMPARED = tuple(described.name for described in fields(Settings) if described.metadata["compared"])


def takes(kind: type[K]) -> Callable[[F], F]:
    """Show every field of `kind` in the signature and the docstring of a function that takes them as `**settings`.

    A parameter that the function names itself stays as it is.
    """

    def show(function: F) -> F:
        own = inspect.signature(function)
        *named, _ = own.parameters.values()  # the last is **settings
        hints = get_type_hints(kind)
        shown = [described for described in fields(kind) if described.name not in own.parameters]
        added = [
            inspect.Parameter(
                described.name, inspect.Parameter.KEYWORD_ONLY, default=described.default,
                annotation=hints[described.name],
            )
            for described in shown
        ]  # fmt: skip
        lines = (f"{described.name}: {described.metadata['help']}" for described in shown)
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *lines])
        vars(function)["__signature__"] = own.replace(parameters=[*named, *added])
        return function

    return show


def read(kind: type[K], given: Mapping[str, Any], *, by: str) -> K:
    """Make settings of what a function was given, or name the one that it does not know."""
    known = option_names(kind)
    for name in given:
        if name not in known:
            way_out = suggestion(name, known) or f"; it takes {', '.join(known)}"
            raise BadInput(f"{name} must be a setting of {by}, which knows none of that name{way_out}")
    return kind(**given)
