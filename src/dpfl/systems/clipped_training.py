"""What UDP and its rivals share: local training under a clip, noise on what is uploaded, and how C is chosen.

Clients clip each record's gradient, as the paper's algorithms say, or the parameters that they end with, as its
experiments do. For a record that is replaced by another the first proves 2ηC/n_i for one step and 2ηC more for each
that follows; the second proves 2C, whatever happened in between, where the paper claims 2C/n_i.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from dpfl.errors import BadInput, require_positive
from dpfl.orders import Gaussian, ModelClip, Need, Order, RecordClip, sensitivity
from dpfl.privacy.budget import Calibration
from dpfl.privacy.calibration import beside_a_count
from dpfl.systems.system import ADDED_0_3, Feedback, PrivateSystem, State, local_training, require_local_training


@dataclass(frozen=True, kw_only=True)
class ClippedState(State):
    """The state, and what everybody clips to, where that follows the median; None where it stays as it was given."""

    clip: float | None = None  # C now
    first_clip: float | None = None


C = TypeVar("C", bound=ClippedState)

_STEP = 0.2  # how fast C follows the median where it is counted out: a tenth a round at most
_FURTHEST = 1e6  # times the first C, or below it: nobody should have to divide by what a long training made of it


@dataclass(frozen=True, kw_only=True)
class ClippedTraining(PrivateSystem[C]):
    """Local training from the broadcast model, clipped and then noised before it is uploaded."""

    lr: float = 2.0
    calibration: Calibration = "tight"
    clip: float | Literal["median"] = 1.0  # type: ignore[assignment]  # C, or: as long as half of what is clipped
    first_clip: float | None = field(
        default=None, metadata=ADDED_0_3
    )  # the C that the median begins with; None: the first model's length for parameters, 1 for gradients
    clipping: Literal["record", "model"] | None = field(
        default=None, metadata=ADDED_0_3
    )  # what is clipped: each record's gradient, or the parameters; None: record
    local_steps: int = field(default=1, metadata=ADDED_0_3)  # E
    local_epochs: int | None = field(
        default=None, metadata=ADDED_0_3
    )  # passes over a client's records, instead of local_steps
    batch_size: int | None = field(default=None, metadata=ADDED_0_3)  # records a step, shuffled; None for all

    def __post_init__(self) -> None:
        super().__post_init__()
        require_local_training(
            self.local_steps, self.local_epochs, self.batch_size, usual_steps=type(self).local_steps,
            clips_records=not self.clips_parameters,
        )  # fmt: skip
        if self.calibration == "paper" and self.cohort is not None and self.scheduling != "random":
            raise BadInput(
                f"scheduling must be 'random' in UDP's paper calibration, whose noise counts on chance (q = K/N), was"
                f" {self.scheduling!r}; calibrate tightly, or leave it out"
            )
        if self.first_clip is not None:
            require_positive("first_clip", self.first_clip, "leave it out for the usual one")
            if not self.follows_the_median:
                raise BadInput(
                    f"first_clip must come with clip=median, was {self.first_clip:g} with clip={self.clip!r}; leave it"
                    " out"
                )

    def require_clip(self) -> None:
        """Take the word as well as a number; what has no price is refused."""
        if self.clip != "median":
            super().require_clip()
        elif self.clips_parameters and self.calibration == "tight":
            raise BadInput(
                "clip must be a number for parameters in tight calibration, was 'median': a client has only one length"
                " to tell, which no noise that leaves something of it hides; give a number, or clip each record's"
                " gradient (clipping=record)"
            )

    @property
    def clips_parameters(self) -> bool:
        """Tell whether the parameters are clipped, and not each record's gradient."""
        return self.clipping == "model"

    @property
    def follows_the_median(self) -> bool:
        """Tell whether C follows the median of what is clipped."""
        return self.clip == "median"

    @property
    def needs(self) -> frozenset[Need]:
        """Return what the median follows: lengths without noise in the paper, else counts that are paid for."""
        if not self.follows_the_median:
            return frozenset()
        return frozenset({"length"} if self.calibration == "paper" else {"counts"})

    @property
    def claims(self) -> bool:
        """Tell whether noise is made for what the paper claims: that clipped parameters move by 2C/n_i."""
        return self.clips_parameters and self.calibration == "paper"

    def claimed_sensitivity(self, sizes: Sequence[int]) -> float | tuple[float, ...]:
        """Return what the noise is made for, of each client, as a share of what the clipping proves."""
        return tuple(1 / records for records in sizes) if self.claims else 1.0

    def cohort_rate(self, clients: int) -> float:
        """Return q = K/N."""
        return (self.cohort or clients) / clients

    def begin_clip(self, model: Tensor) -> float | None:
        """Return the C that the median begins with, which tells nothing about anybody's records."""
        if not self.follows_the_median:
            return None
        if self.first_clip is not None or not self.clips_parameters:
            return self.first_clip or 1.0
        return float(torch.linalg.vector_norm(model.double())) or 1.0

    def order(
        self, clip: float, done: int, records: int, noise: Gaussian | None, count_noise: Gaussian | None = None
    ) -> Order:
        """Order a client's training in the round after `done` rounds."""
        return Order(
            **local_training(self.local_steps, self.local_epochs, self.batch_size, records),
            learning_rate=self.rate(done), clip=ModelClip(clip) if self.clips_parameters else RecordClip(clip),
            noise=noise, noise_on="upload", count_noise=count_noise,
        )  # fmt: skip

    def reach(self, clip: float, done: int, records: int) -> float:
        """Return Δ_i, which the noise of that round is made for: what is proved, or what the paper claims."""
        proved = record_sensitivity(self.order(clip, done, records, None), records)
        return proved / records if self.claims else proved

    def clip_now(self, clip: float | None) -> float:
        """Return C: what follows the median, or else what was given."""
        if clip is not None:
            return clip
        assert not isinstance(self.clip, str)
        return self.clip

    def first_bounds(self, clip: float | None, sizes: Sequence[int]) -> list[float]:
        """Return clients' Δ_i at the first C and rate, in terms of which noise is chosen."""
        reaches = {records: self.reach(self.clip_now(clip), 0, records) for records in set(sizes)}
        return [reaches[records] for records in sizes]

    def noised_orders(self, state: C, stds: Mapping[int, float]) -> dict[int, Order]:
        """Order the round of some clients, under noise that is given in terms of the first C and rate.

        It grows and shrinks with Δ_i, so that a round costs what it would have cost then.
        """
        clip, sizes, counted = self.clip_now(state.clip), state.problem.sizes, "counts" in self.needs
        cohort = self.cohort or len(sizes)
        of_size = {sizes[client] for client in stds}
        firsts = {records: self.reach(self.clip_now(state.first_clip), 0, records) for records in of_size}
        growths = {records: self.reach(clip, state.round, records) / firsts[records] for records in of_size}
        orders = {}
        for client, std in stds.items():
            records, count_noise = sizes[client], None
            if counted:
                multiplier, of_count = beside_a_count(std / firsts[records], records, cohort)
                std, count_noise = multiplier * firsts[records], Gaussian(of_count)  # a replaced record counts for 1
            noise = Gaussian(std * growths[records])
            orders[client] = self.order(clip, state.round, records, noise, count_noise)
        return orders

    def next_clip(self, state: C, feedback: Feedback) -> float:
        """Return the C of the next round: the median of what was told, or a step towards where half is unclipped."""
        clip, first = state.clip, state.first_clip
        assert clip is not None
        assert first is not None
        if "length" in feedback.answers:
            told = [length for length in feedback.answers["length"].values() if 0 < length < math.inf]
            clip = statistics.median(told) if told else clip
        elif feedback.counts is not None:
            share = min(max(0.5 + feedback.counts, 0.0), 1.0)  # whatever the noise makes of it
            clip *= math.exp(-_STEP * (share - 0.5))
        return min(max(clip, first / _FURTHEST), first * _FURTHEST)


def record_sensitivity(order: Order, records: int) -> float:
    """Return how far one replaced record moves the upload."""
    return sensitivity(order, records=records, unit="record", neighbours="replace", norm=2)
