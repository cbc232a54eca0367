"""The command line, run inside the tests' own process: one of its own takes seconds to start, and is for signals."""

import io
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen
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


@contextmanager
def started(*args: str, cwd: Path) -> Iterator[Popen[str]]:
    """Start `dpfl ARGS` as a process of its own that listens to signals, and let it end with the block."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts aside would not listen
    command = [str(Path(sys.executable).with_name("dpfl")), *args]
    try:
        with Popen(command, cwd=cwd, stderr=PIPE, stdout=PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        signal.signal(signal.SIGINT, before)


def _exit_code() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("always", Caution)  # as for a user, who does not make errors of them
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)
