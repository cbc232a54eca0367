"""One question about noise, steps and ε, asked of three accountants: the one that is missing is found."""

from collections.abc import Callable
from typing import Any, cast

from dpfl.errors import BadInput, require_count, require_positive
from dpfl.privacy import renyi
from dpfl.privacy.accounting import Accountant, Mechanism, NoiseLaw, Sampling, least_noise, most_steps, tight
from dpfl.privacy.budget import Budget
from dpfl.privacy.certificate import finite
from dpfl.privacy.paper_formulas import ali_epsilon

_ACCOUNTANTS: dict[str, Accountant] = {"tight": tight, "rdp": renyi.epsilon, "paper": ali_epsilon}

Found = dict[str, Any]  # tight, rdp, paper: a number, or None where there is no such formula or no finite answer


def account(**numbers: Any) -> dict[str, Found]:
    """Return what `dpfl account --json` prints: the one that is missing, by three accountants.

    Takes what `answer` takes.

    >>> account(noise_multiplier=10.0, epsilon=0.5, mechanism="laplace")
    {'steps': {'tight': 5, 'rdp': 5, 'paper': 5}}
    """
    question, found = answer(**numbers)
    return {question: found}


def answer(
    *,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    sampling_rate: float = 1.0,
    mechanism: str = "gaussian",
    sampling: str = "poisson",
) -> tuple[str, Found]:
    """Find whichever of noise multiplier, steps and epsilon is None, rounded to the safe side; return its name too.

    >>> answer(noise_multiplier=10.0, epsilon=0.5, mechanism="laplace")
    ('steps', {'tight': 5, 'rdp': 5, 'paper': 5})
    """
    given = {"noise_multiplier": noise_multiplier, "steps": steps, "epsilon": epsilon}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        raise BadInput(
            "two of noise_multiplier, steps and epsilon must be given, so that the third can be found, but"
            f" {'all three were' if not missing else ' and '.join(missing) + ' were left out'}; leave out just one"
        )
    if delta is None:
        if mechanism == "gaussian":
            raise BadInput("delta must be given with gaussian noise, was left out; choose 1e-5, say")
        delta = 0.0
    if steps is not None:
        require_count("steps", steps, "ask for at least one")
    if noise_multiplier is not None:
        require_positive("noise_multiplier", noise_multiplier, "noise of 1 sensitivity is a common start")
    multiplier = 1.0 if noise_multiplier is None else float(noise_multiplier)
    one = Mechanism(cast(NoiseLaw, mechanism), multiplier, sampling_rate, cast(Sampling, sampling))
    budget = Budget(1.0 if epsilon is None else epsilon, delta)
    if mechanism == "gaussian" and delta == 0:
        raise BadInput("delta must be above 0 with gaussian noise, was 0; choose 1e-5, say")

    find: dict[str, Callable[[Accountant], float]] = {
        "epsilon": lambda accountant: accountant({one: steps or 1}, delta),
        "steps": lambda accountant: most_steps(accountant, one, budget),
        "noise_multiplier": lambda accountant: least_noise(accountant, one, steps or 1, budget),
    }
    question = missing[0]
    return question, {
        name: finite(find[question](accountant)) if _has_formula(name, one) else None
        for name, accountant in _ACCOUNTANTS.items()
    }


def _has_formula(accountant: str, mechanism: Mechanism) -> bool:
    """Say whether the papers count this: they sample by Poisson, and never with Laplace noise."""
    return accountant != "paper" or mechanism.plain or (mechanism.noise, mechanism.sampling) == ("gaussian", "poisson")
