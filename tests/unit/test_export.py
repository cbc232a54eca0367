"""Results for other tools: what a run, a comparison and repetitions are as rows, as CSV and as pandas frames."""

import csv
import math
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pandas
import pytest

import dpfl
from dpfl.comparison import Comparison, compare, contenders
from dpfl.errors import BadInput
from dpfl.report.frames import write
from dpfl.training import Run

FEW = {"clients": 3, "rounds": 2}


@cache
def trained() -> Run:
    digits = dpfl.federate("digits", clients=4, seed=1)
    return dpfl.train(dpfl.UDP(epsilon=8, delta=1e-3, rounds=4), digits, seed=1, evaluate_every=2)


@cache
def several() -> Comparison:
    return compare(contenders(["udp", "nbafl", "fedavg"], FEW), seeds=2, epsilon=4.0)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_history_is_a_row_a_round_with_the_keys_of_its_metrics(tmp_path: Path) -> None:
    run = trained()
    frame = run.to_frame()
    assert list(frame.columns) == list(dpfl.RoundMetrics.__annotations__)
    assert frame["round"].tolist() == [1, 2, 3, 4]
    assert frame["accuracy"].iloc[-1] == run.accuracy
    assert frame["loss"].isna().tolist() == [True, False, True, False]  # nobody looked after those rounds
    run.to_csv(tmp_path / "history.csv")
    lines = read(tmp_path / "history.csv")
    assert [line["loss"] for line in lines[::2]] == ["", ""]
    assert float(lines[-1]["loss"]) == run.loss  # every digit
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "history.csv"), frame, check_exact=True)
    assert isinstance(run.history[0]["refused"], list)  # the history itself stays as it is


def test_of_the_clients_that_could_not_pay_a_row_has_the_number() -> None:
    run = trained()
    history = [{**line, "refused": [7, 9]} for line in run.history]
    assert Run(**{**vars(run), "history": history}).to_frame()["refused"].tolist() == [2, 2, 2, 2]


def test_what_is_there_nowhere_stays_a_column_of_numbers() -> None:
    x = np.arange(90.0, dtype=np.float32)[:, None] % 7
    own = dpfl.federate((x, x[:, 0] + 1), clients=3, seed=1)
    frame = dpfl.train(dpfl.FedSGD(rounds=2, lr=0.01), own, seed=1).to_frame()
    assert frame["accuracy"].isna().all()
    assert frame["accuracy"].dtype == frame["noise_std"].dtype == float


def test_a_comparison_is_a_row_a_training() -> None:
    whole = several()
    frame = whole.to_frame()
    assert frame[["label", "seed"]].values.tolist() == [
        [label, seed] for label in ("udp", "nbafl", "fedavg") for seed in (1, 2)
    ]  # fmt: skip
    runs = [run for result in whole.results for run in result.runs]
    assert frame["accuracy"].tolist() == [run.accuracy for run in runs]
    assert frame["rounds"].tolist() == [2] * 6
    nbafl = frame[frame["label"] == "nbafl"].iloc[0]
    assert nbafl["true_epsilon"] == pytest.approx(4.0, rel=1e-3)
    assert nbafl["claimed_epsilon"] < 3.9  # it promises readers what the server's ε is more than
    assert (nbafl["promised_unit"], nbafl["promised_neighbours"], nbafl["neighbours"]) == (
        "record",
        "replace",
        "replace",
    )
    assert frame[frame["label"] == "fedavg"][["true_epsilon", "claimed_epsilon", "neighbours"]].isna().all(axis=None)


def test_its_summary_is_a_row_a_system_and_its_means_are_those_of_the_trainings() -> None:
    frame, summary = several().to_frame(), several().summary_frame()
    assert summary["label"].tolist() == ["udp", "nbafl", "fedavg"]
    assert summary["seeds"].tolist() == [2, 2, 2]
    own = frame.groupby("label", sort=False)
    for name in ("accuracy", "loss"):
        assert summary[name].tolist() == pytest.approx(own[name].mean().tolist())
        assert summary[f"{name}_standard_error"].tolist() == pytest.approx(own[name].sem().tolist())


def test_its_histories_are_a_row_a_round_of_every_training() -> None:
    frame = several().history_frame()
    assert len(frame) == 3 * 2 * 2
    last = frame[frame["round"] == 2].reset_index(drop=True)
    assert last["accuracy"].tolist() == several().to_frame()["accuracy"].tolist()


def test_a_search_shows_what_was_found_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "best.toml").write_text('system = "udp"\nclients = 3\nsearch.rounds = [1, 2]\n', encoding="utf-8")
    frame = compare(contenders([str(tmp_path / "best.toml")], {}), seeds=1, epsilon=4.0).to_frame()
    assert len(frame) == 1  # the trainings that are shown
    assert tomllib.loads(frame["searched"][0]) == {"rounds": frame["rounds"][0]}
    assert frame["label"][0] == "best"


def test_a_folder_of_a_comparison_holds_its_csv_and_its_latex(tmp_path: Path) -> None:
    whole = compare(contenders(["udp", "fedavg"], FEW), seeds=2, epsilon=4.0, out=tmp_path / "c")
    read_again = pandas.read_csv(tmp_path / "c" / "comparison.csv")
    pandas.testing.assert_frame_equal(read_again, whole.to_frame(), check_dtype=False, check_exact=True)
    assert (tmp_path / "c" / "comparison.tex").read_text(encoding="utf-8") == whole.to_latex()


def test_repetitions_are_a_row_a_look_at_each(tmp_path: Path) -> None:
    digits = dpfl.federate("digits", clients=4, seed=1)
    (result,) = dpfl.repeat(dpfl.UDP(rounds=2, delta=1e-3), digits, repetitions=3, evaluate_every=1, seed=1)
    frame = result.to_frame()
    assert frame[["round", "repetition"]].values.tolist() == [[at, own] for at in (1, 2) for own in (1, 2, 3)]
    assert frame["loss"].tolist()[3:] == result.losses
    assert frame["accuracy"].tolist()[3:] == result.accuracies
    result.to_csv(tmp_path / "r.csv")
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "r.csv"), frame, check_exact=True)


def test_csv_needs_no_pandas_and_a_frame_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.errors.find_spec", lambda _: None)
    trained().to_csv(tmp_path / "history.csv")
    assert len(read(tmp_path / "history.csv")) == 4
    with pytest.raises(
        BadInput, match=r"^pandas must be installed for a frame, and is not; pip install dpfl\[pandas\]$"
    ):
        trained().to_frame()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^path must be a file that can be written, was '.*none/h\.csv' \(No such file"):
        trained().to_csv(tmp_path / "none" / "h.csv")


def test_names_with_commas_quotes_and_lines_stay_in_their_cell(tmp_path: Path) -> None:
    name = 'a, "b"\nc'
    write([{"label": name, "loss": None, "delta": 1e-5}, {"label": "ε", "loss": math.pi, "delta": 0.1}], tmp_path / "x")
    assert read(tmp_path / "x") == [
        {"label": name, "loss": "", "delta": "1e-05"},
        {"label": "ε", "loss": repr(math.pi), "delta": "0.1"},
    ]
