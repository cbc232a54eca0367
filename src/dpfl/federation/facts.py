"""What is known of data before the first round: by public records or by the caller, and by no private one.

How many classes there are, whether values can be used, whether anything ends with an error: whatever a private record
decided there would be an uncounted release of it. So public records must be sound and are refused where they are not,
and a private one that is not is marked: it stays where it is, since how many records a client holds is public, and its
features become NaN, so that its gradient is not finite and counts as zero.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl.errors import BadInput, require_count
from dpfl.federation.records import Federation, Records, Separate, Transform


def classes_of(given: int | None, public: Sequence[Tensor]) -> int | None:
    """Return how many classes there are, as the caller says or as public targets show; None for regression."""
    if any(targets.is_floating_point() for targets in public):
        if given is not None:
            raise BadInput(
                f"classes must be left out for floating-point targets, was {given!r}; leave it out for regression, or"
                " give whole-number labels"
            )
        return None
    if given is not None:
        require_count("classes", given, "leave it out to count the labels of the public records")
        return given
    present = np.unique(torch.cat(list(public)).numpy()).tolist()
    if present != list(range(len(present))):
        raise BadInput(
            f"classes must be given where the public records (test and validation) do not show labels 0..C-1 with each"
            f" of them present, was None, and they show {len(present)} labels from {present[0]} to {present[-1]};"
            " give classes=C for labels numbered 0..C-1, or make them float for regression"
        )
    return len(present)


def require_finite(records: Records, rows: Tensor, field: str) -> None:
    """Refuse public records with NaN or infinity, and say how many they are and which row of the caller's is first."""
    for values, what, way_out in (
        (records.x, "features", "drop or fill those records"),
        (records.y, "targets", "drop those records"),
    ):
        bad = ~_finite(values)
        if bad.any():
            raise BadInput(
                f"{field} {what} must be finite, had NaN or infinity in {int(bad.sum())} of {len(bad)} rows, "
                f"first in row {int(rows[bad][0])}; {way_out}"
            )


def require_known(records: Records, classes: int | None, field: str) -> None:
    """Refuse public labels that are none of the classes."""
    if classes is not None and not _known(records.y, classes).all():
        raise BadInput(
            f"{field} must have labels 0..{classes - 1} for {classes} classes, had labels from {int(records.y.min())}"
            f" to {int(records.y.max())}; number them so, or raise classes"
        )


def marked(records: Records, classes: int | None) -> tuple[Records, list[str]]:
    """Mark private records that cannot be computed, and say for their owner alone how many and why.

    What is wrong with a record leaves no trace: all that are marked look alike.
    """
    finite = _finite(records.x) & _finite(records.y)
    known = finite if classes is None else _known(records.y, classes)
    sound = finite & known
    if sound.all():
        return records, []
    x, y = records.x.clone(), records.y.clone()
    x[~sound] = _blank(x.dtype)
    y[~sound] = 0
    reasons = {"with NaN or infinity": int((~finite).sum())}
    if classes is not None:
        reasons[f"with a label outside 0..{classes - 1} (give classes= if there are more)"] = int(
            (finite & ~known).sum()
        )
    return Records(x, y), [f"{count:,} {reason}" for reason, count in reasons.items() if count]


def sound(records: Records) -> Records:
    """Return the records that can be computed, for reports on them: nobody can score the others."""
    return records.take(_finite(records.x))


def require_usable(federation: Federation) -> None:
    """Refuse clients' records that cannot be computed where nothing is promised: no clip would take them for zero."""
    spoilt = (marked(records, federation.classes)[0].x for records in federation.clients)
    broken = sum(int((~_finite(x)).sum()) for x in spoilt)
    if broken:
        raise BadInput(
            f"data must be usable where no privacy is promised and each record counts as it is, but {broken:,} of"
            f" {sum(federation.sizes):,} clients' records are not; drop or fill them, or choose a private system"
        )


def prepared(transform: Transform, pool: Tensor, public: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of pool and test under a preprocessing; what a private record cannot be made of becomes NaN.

    It is shown one record at a time, public ones first: what it makes of public records together could not show that it
    mixes records beyond their range. dpfl's own are known to mix nothing.

    public: the positions of records for which, as for the test split, an error stays an error.
    """
    if type(transform) is Separate:
        tests = transform(test)
        return _at_once(transform, pool, public), tests
    shown = _one_by_one(transform, pool[public])
    _require_separate(transform(pool[public]), shown)
    tests = _one_by_one(transform, test, like=shown)
    features = torch.full((len(pool), *shown.shape[1:]), _blank(shown.dtype), dtype=shown.dtype)
    for place, record in zip(_singly(features), _singly(pool), strict=True):
        _prepare(transform, record, place)
    features[public] = shown
    return features, tests


def _one_by_one(transform: Transform, public: Tensor, like: Tensor | None = None) -> Tensor:
    """Return what a preprocessing makes of public records, each alone; it must be one row of one shape and type."""
    rows: list[Tensor] = []
    for record in _singly(public):
        row = transform(record.clone())
        expected = like if like is not None else (rows or [row])[0]
        if not _like(row, expected):
            raise BadInput(
                "fit must return a preprocessing that makes a row [1, ...] of one shape and type of each record"
                f" [1, ...], but of a public one it made {_described(row)}; let it fill in, and drop no record"
            )
        rows.append(row.detach().clone())  # it may hand out the same memory again
    return torch.cat(rows)


def _singly(x: Tensor) -> Sequence[Tensor]:
    """Return each record as [1, ...], in the memory where it is."""
    return torch.split(x, 1)


def _like(row: object, expected: object) -> bool:
    return (
        isinstance(row, Tensor)
        and isinstance(expected, Tensor)
        and row.dtype == expected.dtype
        and row.shape == (1, *expected.shape[1:])
    )


def _described(made: object) -> str:
    return f"{list(made.shape)} of {made.dtype}" if isinstance(made, Tensor) else repr(type(made).__name__)


def _prepare(transform: Transform, record: Tensor, place: Tensor) -> bool:
    """Put what becomes of one private record into its place; where that cannot be done, leave it and say so."""
    try:
        row = transform(record.clone())
        fits = _like(row, place)
        if fits:
            place.copy_(row.detach())
    except Exception:  # of any kind, and what it says may quote the record
        return False
    return fits


def _require_separate(together: Tensor, apart: Tensor) -> None:
    """Refuse a preprocessing that makes something else of public records apart: each alone would not be what is meant.

    This is for whoever wrote it, and no proof: private records are prepared apart, whatever it does with several.
    """
    rounding = 1e-4 * max(1.0, apart.float().nan_to_num().abs().max().item())
    if together.shape != apart.shape or not torch.allclose(
        together.float(), apart.float(), rtol=0, atol=rounding, equal_nan=True
    ):
        raise BadInput(
            "fit must return a preprocessing that treats each record by itself, but it makes other features of public"
            " records alone than of all of them; let it keep the statistics of those that it is handed"
        )


def _at_once(transform: Transform, pool: Tensor, public: Tensor) -> Tensor:
    """Return what a preprocessing that mixes nothing makes of all records; those that it cannot take become NaN."""
    try:
        return transform(pool)
    except Exception:  # of any kind, and what it says may quote a record
        pass
    place = transform(pool[public])[:1].clone()  # an error of public records says so itself
    broken = [row for row, record in enumerate(_singly(pool)) if not _prepare(transform, record, place)]
    filled = pool.clone()
    filled[broken] = pool[public[0]]  # as many as before: what becomes of the others is the same to the last bit
    features = transform(filled)
    features[broken] = _blank(features.dtype)
    return features


def _blank(dtype: torch.dtype) -> float:
    """Return what stands for features that cannot be computed: NaN, or a number that no table of tokens has."""
    if dtype.is_floating_point:
        return math.nan
    return torch.iinfo(dtype).min if dtype.is_signed else 0


def _finite(values: Tensor) -> Tensor:
    blank = values == _blank(values.dtype) if values.dtype.is_signed else torch.zeros_like(values, dtype=torch.bool)
    return (torch.isfinite(values) & ~blank).reshape(len(values), values[:1].numel()).all(dim=1)


def _known(labels: Tensor, classes: int) -> Tensor:
    return (labels >= 0) & (labels < classes)
