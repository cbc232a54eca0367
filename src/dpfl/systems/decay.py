"""How a learning rate falls over a training: a word, and the numbers that it needs.

t counts from 1: rounds, where a round has one rate, or the local steps of the whole training, where the theory of a
system does (`dp-fedavg`, `fedsgd-dpc`). A rate is public, and what follows from it (noise, sensitivity) follows the
rate of its own round.
"""

import math

from dpfl.errors import BadInput, choose

FORMS = {
    "constant": "constant",
    "inverse-sqrt": "inverse-sqrt",
    "inverse": "inverse:GAMMA",
    "step": "step:EVERY:FACTOR",
}


def factor(schedule: str, done: int) -> float:
    """Return what is left of the first rate after so many rounds, or steps: at t = done + 1.

    constant: all of it. inverse-sqrt: 1/√t. inverse:GAMMA: γ/(t − 1 + γ), or 1/t for a plain inverse.
    step:EVERY:FACTOR: FACTOR once more after every EVERY rounds.

    >>> [round(factor("inverse-sqrt", done), 3) for done in range(4)]
    [1.0, 0.707, 0.577, 0.5]
    >>> factor("inverse", 1), factor("inverse:3", 1), factor("step:10:0.5", 25)
    (0.5, 0.75, 0.25)
    >>> factor("step:10", 3)
    Traceback (most recent call last):
    ...
    dpfl.errors.BadInput: lr_schedule must be written step:EVERY:FACTOR with EVERY a whole number of at least 1 and ...
    """
    kind, *written = str(schedule).strip().split(":")
    form = choose("lr_schedule", kind, FORMS)
    numbers = [_number(text) for text in written]
    if kind == "inverse" and not numbers:
        numbers = [1.0]
    if kind == "step":
        if not (len(numbers) == 2 and numbers[0] >= 1 and numbers[0].is_integer() and 0 < numbers[1] <= 1):
            raise BadInput(
                f"lr_schedule must be written {form} with EVERY a whole number of at least 1 and FACTOR above 0 and at"
                f" most 1, was {schedule!r}; write for example 'step:50:0.5'"
            )
        return float(numbers[1] ** (done // int(numbers[0])))
    if kind == "inverse":
        if not (len(numbers) == 1 and 0 < numbers[0] < math.inf):
            raise BadInput(
                f"lr_schedule must be written {form} with GAMMA above 0, was {schedule!r}; write for example"
                " 'inverse:10', or 'inverse' for 1/t"
            )
        return numbers[0] / (done + numbers[0])
    if numbers:
        raise BadInput(f"lr_schedule {kind!r} takes no number, was {schedule!r}; write {kind!r}")
    return 1.0 if kind == "constant" else 1 / math.sqrt(done + 1)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
