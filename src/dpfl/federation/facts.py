"""What is known of data before the first round: by public records or by the caller, and by no private one.

How many classes there are, whether values can be used, whether anything ends with an error: whatever a private record
decided there would be an uncounted release of it. So public records must be sound and are refused where they are not,
and a private one that is not is marked: it stays where it is, since how many records a client holds is public, and its
features become NaN, so that its gradient is not finite and counts as zero.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl.errors import BadInput, require_count
from dpfl.federation.records import Federation, Records

Transform = Callable[[Tensor], Tensor]


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
    x[~sound] = math.nan if x.is_floating_point() else torch.iinfo(x.dtype).min  # which no table of tokens has
    y[~sound] = 0
    reasons = {"with NaN or infinity": int((~finite).sum())}
    if classes is not None:
        reasons[f"with a label outside 0..{classes - 1} (give classes= if there are more)"] = int(
            (finite & ~known).sum()
        )
    return Records(x, y), [f"{count:,} {reason}" for reason, count in reasons.items() if count]


def require_usable(federation: Federation) -> None:
    """Refuse clients' records that cannot be computed where nothing is promised: no clip would take them for zero."""
    spoilt = (marked(records, federation.classes)[0].x for records in federation.clients)
    broken = sum(int((~_finite(x)).sum()) for x in spoilt)
    if broken:
        raise BadInput(
            f"data must be usable where no privacy is promised and each record counts as it is, but {broken:,} of"
            f" {sum(federation.sizes):,} clients' records are not; drop or fill them, or choose a private system"
        )


def transformed(transform: Transform, x: Tensor, public: Tensor) -> Tensor:
    """Return the features [n, ...] under a preprocessing; those of a private record that it cannot take become NaN.

    public: the positions of records for which an error stays an error.
    """
    _require_separate(transform, x[public])
    found = _tried(transform, x)
    if found is not None:
        return found
    broken = torch.tensor(_broken(transform, x), dtype=torch.long)
    filled = x.clone()
    filled[broken] = x[public[0]]  # as many as before: what becomes of the others is the same to the last bit
    result = transform(filled).clone()
    result[broken] = math.nan
    return result


def _require_separate(transform: Transform, public: Tensor) -> None:
    """Refuse a preprocessing that makes something else of public records apart: it would mix private ones too.

    What is wrong with public records, or with the preprocessing itself, is said as it is.
    """
    half = len(public) // 2
    together = transform(public)
    if half == 0:
        return
    apart = torch.cat([transform(part) for part in (public[:half], public[half:])])
    rounding = 1e-4 * max(1.0, together.float().nan_to_num().abs().max().item())
    if apart.shape != together.shape or not torch.allclose(apart, together, rtol=0, atol=rounding, equal_nan=True):
        raise BadInput(
            "fit must return a preprocessing that treats each record by itself, but it makes other features of public"
            " records in halves than of all of them; let it keep the statistics of those that it is handed"
        )


def _tried(transform: Transform, x: Tensor) -> Tensor | None:
    try:
        return transform(x)
    except Exception:  # of any kind, and what it says may quote the record
        return None


def _broken(transform: Transform, x: Tensor, start: int = 0) -> list[int]:
    """Find the records that a preprocessing cannot take, by halves."""
    if _tried(transform, x) is not None:
        return []
    if len(x) == 1:
        return [start]
    half = len(x) // 2
    return _broken(transform, x[:half], start) + _broken(transform, x[half:], start + half)


def _finite(values: Tensor) -> Tensor:
    return torch.isfinite(values).reshape(len(values), values[:1].numel()).all(dim=1)


def _known(labels: Tensor, classes: int) -> Tensor:
    return (labels >= 0) & (labels < classes)
