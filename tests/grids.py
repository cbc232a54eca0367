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
    names: str | Sequence[str],
    values: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Callable[[Any], object] | Iterable[object] | None = None,
) -> Callable[[Test], Test]:
    """Call a test with each of the values in turn, as `pytest.mark.parametrize` would, in one test.

    Values that take long to find are a function, which is called by the test alone.
    Fixtures are made once for all cases, but every case has patches and an empty folder of its own, and torch's own
    randomness where the test found it.
    """
    keys = names.replace(",", " ").split() if isinstance(names, str) else list(names)
    if not callable(values):
        values = list(values)
    titles = None if ids is None or callable(ids) else [str(title) for title in ids]
    name = ids if callable(ids) else repr

    def title(number: int, case: dict[str, Any]) -> str:
        return titles[number] if titles else ", ".join(f"{key}={name(value)}" for key, value in case.items())

    def decorate(test: Test) -> Test:
        parameters = inspect.signature(test).parameters

        @functools.wraps(test)
        def through_all(**fixtures: Any) -> None:
            randomness = torch.get_rng_state()
            found = list(values() if callable(values) else values)
            assert found, f"no case of {names}"
            for number, value in enumerate(found):
                case = dict(zip(keys, (value,) if len(keys) == 1 else value, strict=True))
                own: dict[str, Any] = {}
                torch.set_rng_state(randomness)
                with ExitStack() as patches:
                    if "monkeypatch" in fixtures:
                        own["monkeypatch"] = patches.enter_context(pytest.MonkeyPatch.context())
                    if "tmp_path" in fixtures:
                        own["tmp_path"] = fixtures["tmp_path"] / str(number)
                        own["tmp_path"].mkdir()
                    try:
                        test(**fixtures | case | own)
                    except (Exception, pytest.fail.Exception) as failure:
                        failure.add_note(f"case: {title(number, case)}")
                        raise

        rest = [parameter for name, parameter in parameters.items() if name not in keys]
        vars(through_all)["__signature__"] = inspect.Signature(rest)  # what pytest finds fixtures for
        return through_all

    return decorate
