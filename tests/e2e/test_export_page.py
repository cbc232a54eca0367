"""The page on results in other tools: what it shows runs, in the order in which it stands there."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


@pytest.mark.skipif(
    not all(map(find_spec, ("pandas", "tensorboard", "mlflow"))), reason="pip install dpfl[pandas,tensorboard,mlflow]"
)
def test_the_lines_on_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert (tmp_path / "history.csv").read_text().startswith("round,loss,accuracy")
    assert (tmp_path / "trainings.csv").read_text().count("\n") == 1 + 3 * 3
    assert list((tmp_path / "logs" / "udp").glob("events.*"))
    assert list((tmp_path / "mlruns").rglob("certificate.txt"))
    assert "\\bottomrule" in capsys.readouterr().out


def test_the_page_names_every_column_of_a_row(tmp_path: Path) -> None:
    from dpfl.comparison import compare, contenders

    compare(contenders(["udp"], {"clients": 3, "rounds": 1}), seeds=1, epsilon=4.0, out=tmp_path / "c")
    heading, *_ = (tmp_path / "c" / "comparison.csv").read_text().splitlines()
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table)) == heading.split(",")
