"""What DP-FedAvg and FedSGD-DPC share: clients asked in turn, Laplace or Gaussian noise, and rates that may decay."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from dpfl.errors import BadInput, require_positive
from dpfl.orders import Gaussian, Laplace, Norm, Order, sensitivity
from dpfl.privacy.accounting import NoiseLaw
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.calibration import noise_multipliers
from dpfl.privacy.paper_formulas import open_constant, open_constant_cautions
from dpfl.systems.system import ADDED_0_3, Feedback, PrivateSystem, Problem, State, planned_replies


@dataclass(frozen=True, kw_only=True)
class QueriedState(State):
    """The state, what was promised, and each client's noise in units of the sensitivity of its round."""

    promise: Promise
    noise_multipliers: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class QueriedSystem(PrivateSystem[QueriedState]):
    """K clients in turn, update weights (N/K)·n_i/n, and a choice of noise and of learning rates.

    Rates follow `lr_schedule` step by step: with inverse:γ they are lr·γ/(k + γ) for local step k = 0, 1, … of the
    whole training. The theory's are 2/(μ(k + γ)), with a γ of each paper's own: give μ and λ instead of lr.
    """

    mechanism: NoiseLaw = "gaussian"
    norm: int | None = None  # of the clip: 1 for Laplace noise; 2, or 1, for Gaussian noise
    scheduling: Literal["random", "round-robin", "poisson"] = "round-robin"
    lr: float | None = None
    strong_convexity: float | None = None  # μ of the loss, for the theory's rates
    smoothness: float | None = None  # λ of the loss, for the theory's rates
    paper_constant: float | str | None = field(
        default=None, metadata=ADDED_0_3
    )  # c₂ of the paper's Gaussian noise: a number, or accountant; None: √2, since the paper says only that it exists

    @property
    @abstractmethod
    def usual_lr(self) -> float:
        """Return the rate where none is given."""

    @abstractmethod
    def theory_gamma(self, strong_convexity: float, smoothness: float) -> float:
        """Return the γ of the paper's theory."""

    @abstractmethod
    def order(self, done: int, noise: Gaussian | Laplace | None, records: int) -> Order:
        """Return the order of the round after `done` rounds to a client with so many records."""

    @abstractmethod
    def papers_noise(self, order: Order, records: int, budget: Budget, replies: float) -> Gaussian | Laplace:
        """Return the noise that the paper's formula gives a client for this order, and K·R/N replies of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm is None:
            object.__setattr__(self, "norm", 1 if self.mechanism == "laplace" else 2)
        if self.norm not in (1, 2):
            raise BadInput(f"norm must be 1 or 2, was {self.norm!r}; leave it out for the one that suits the noise")
        if self.mechanism == "laplace" and self.norm == 2:
            raise BadInput(
                "norm must be 1 with Laplace noise, was 2: an L2 clip bounds the L1 norm, which that noise is scaled"
                " to, only by a factor that grows with the model; leave it out, or use mechanism=gaussian"
            )
        self._check_paper_constant()
        theory = (self.strong_convexity, self.smoothness)
        if theory == (None, None):
            if self.lr is None:
                object.__setattr__(self, "lr", self.usual_lr)
            return
        for name, value in zip(("strong_convexity", "smoothness"), theory, strict=True):
            if value is None:
                raise BadInput(f"{name} must be given for the theory's rates, was left out; give both or neither")
            require_positive(name, value, "estimate it on public data")
        if self.lr is not None or self.lr_schedule != "constant":
            raise BadInput(
                "lr and lr_schedule must be left out with the theory's rates, which follow from strong_convexity and"
                f" smoothness, were {self.lr!r} and {self.lr_schedule!r}; give the one or the other"
            )

    def _check_paper_constant(self) -> None:
        chosen = self.paper_constant
        if chosen is None:
            return
        if self.calibration != "paper" or self.mechanism != "gaussian":
            raise BadInput(
                f"paper_constant must be left out but in paper calibration with Gaussian noise, whose formula leaves c₂"
                f" open, was {chosen!r} in {self.calibration} calibration with {self.mechanism} noise; leave it out"
            )
        if isinstance(chosen, str) and chosen != "accountant":
            raise BadInput(
                f"paper_constant must be a number above 0, or accountant, was {chosen!r}; leave it out for √2"
            )
        if not isinstance(chosen, str):
            require_positive("paper_constant", chosen, "leave it out for √2, or say accountant")

    @property
    def noise(self) -> NoiseLaw:
        """Return the chosen law."""
        return self.mechanism

    @property
    def norm_order(self) -> Norm:
        """Return the norm of the clip."""
        return 1 if self.norm == 1 else 2

    def rates(self, done: int, steps: int) -> tuple[float, ...]:
        """Return the rates of the next local steps, after `done` of the whole training."""
        if self.strong_convexity is None or self.smoothness is None:
            return tuple(map(self.rate, range(done, done + steps)))
        gamma = self.theory_gamma(self.strong_convexity, self.smoothness)
        first = 2 / (self.strong_convexity * gamma)
        return tuple(first * gamma / (step + gamma) for step in range(done, done + steps))

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> QueriedState:
        """Choose each client's noise multiplier for the rounds that it will answer."""
        promise, multipliers = self.promise(problem.sizes), [0.0] * len(problem.sizes)
        if self.calibration == "tight":
            replies = planned_replies(problem, 1, self.rounds)
            multipliers = noise_multipliers(self.mechanism, replies, promise.budgets, sampling_rate=self.amplification)
        return QueriedState(
            problem=problem, model=model, rounds=self.rounds, promise=promise, noise_multipliers=tuple(multipliers)
        )

    @property
    def amplification(self) -> float:
        """Return the rate at which records are sampled, where that makes noise worth more."""
        return 1.0

    def open_constant(self, budget: Budget, replies: float) -> float:
        """Return the c₂ of a client's noise in paper calibration, for K·R/N replies."""
        return open_constant(self.paper_constant, replies=replies, budget=budget, sampling_rate=self.amplification)

    @property
    def papers_cautions(self) -> tuple[str, ...]:
        """Return what a promise by the paper's formula should be read with."""
        by_formula = self.calibration == "paper" and self.mechanism == "gaussian"
        return open_constant_cautions(self.paper_constant) if by_formula else ()

    def orders(self, state: QueriedState) -> dict[int, Order]:
        """Order the round's steps, with noise in proportion to their sensitivity."""
        made: dict[tuple[int, float, Budget], Order] = {}  # clients that are alike share one
        orders = {}
        for client in state.cohort:
            alike = state.problem.sizes[client], state.noise_multipliers[client], state.promise.budgets[client]
            if alike not in made:
                plain = self.order(state.round, None, state.problem.sizes[client])
                made[alike] = replace(plain, noise=self._noise(state, plain, client))
            orders[client] = made[alike]
        return orders

    def papers_replies(self, clients: int) -> float:
        """Return K·R/N, by which the papers count a client's answers: it need not be a whole number."""
        return (self.cohort or clients) * self.rounds / clients

    def _noise(self, state: QueriedState, plain: Order, client: int) -> Gaussian | Laplace:
        promise, sizes = state.promise, state.problem.sizes
        if self.calibration == "paper":
            return self.papers_noise(plain, sizes[client], promise.budgets[client], self.papers_replies(len(sizes)))
        laplace = self.mechanism == "laplace"
        bound = sensitivity(
            plain, records=sizes[client], unit=promise.unit, neighbours=promise.neighbours, norm=1 if laplace else 2
        )
        size = state.noise_multipliers[client] * bound
        return Laplace(size) if laplace else Gaussian(size)

    def weights(self, state: QueriedState, answered: Sequence[int]) -> dict[int, float]:
        """Weigh an update by (N/K)·n_i/n, with K clients that answered: unbiased, though the sum is not always 1."""
        sizes, total = state.problem.sizes, state.problem.total
        return {client: len(sizes) / len(answered) * sizes[client] / total for client in answered}
