"""Grids of cases. A test that goes through thousands of them is one test, and one that fails names its case."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

Test = Callable[..., None]


def each(
    names: str | Sequence[str], values: Iterable[Any], ids: Callable[[Any], object] | Iterable[object] | None = None
) -> Callable[[Test], Test]:
    """Call a test with each of the values in turn, as `pytest.mark.parametrize` would, in one test.

    Fixtures are made once for all cases, but every case has patches and an empty folder of its own, and torch's own
    randomness where the test found it.
    """
    keys = names.replace(",", " ").split() if isinstance(names, str) else list(names)
    cases = [(value,) if len(keys) == 1 else tuple(value) for value in values]
    if ids is None or callable(ids):
        name = ids or repr
        titles = [", ".join(f"{key}={name(one)}" for key, one in zip(keys, case, strict=True)) for case in cases]
    else:
        titles = [str(title) for title in ids]

    def decorate(test: Test) -> Test:
        parameters = inspect.signature(test).parameters

        @functools.wraps(test)
        def through_all(**fixtures: Any) -> None:
            randomness = torch.get_rng_state()
            for number, (title, case) in enumerate(zip(titles, cases, strict=True)):
                own = dict(zip(keys, case, strict=True))
                torch.set_rng_state(randomness)
                with ExitStack() as patches:
                    if "monkeypatch" in fixtures:
                        own["monkeypatch"] = patches.enter_context(pytest.MonkeyPatch.context())
                    if "tmp_path" in fixtures:
                        own["tmp_path"] = fixtures["tmp_path"] / str(number)
                        own["tmp_path"].mkdir()
                    try:
                        test(**fixtures | own)
                    except (Exception, pytest.fail.Exception) as failure:
                        failure.add_note(f"case: {title}")
                        raise

        rest = [parameter for name, parameter in parameters.items() if name not in keys]
        vars(through_all)["__signature__"] = inspect.Signature(rest)  # what pytest finds fixtures for
        return through_all

    return decorate
