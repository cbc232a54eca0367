"""The command line, run inside the tests' own process: one of its own takes seconds to start."""

import io
import sys
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

import pytest

from dpfl.cli import main
from dpfl.errors import Caution

Done = CompletedProcess[str]


def dpfl(*args: str, cwd: Path) -> Done:
    """Run `dpfl ARGS` in a folder and return how it ended; only files stay between calls."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), chdir(cwd), mock.patch.object(sys, "argv", ["dpfl", *args]):
        code = _exit_code()
    return Done(args, code, out.getvalue(), err.getvalue())


def _exit_code() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("always", Caution)  # as for a user, who does not make errors of them
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)
