"""What the accountants found, in words."""

from dpfl.privacy.solve import answer
from dpfl.report.account import text


def test_the_answers_as_a_table() -> None:
    assert text("epsilon", {"tight": 1.35713, "rdp": 1.5, "paper": None}).splitlines() == [
        "tight  ε ≤ 1.358      exact, or privacy-loss distributions",
        "rdp    ε ≤ 1.5        Rényi DP (dp-accounting)",
        "paper  ε ≤ –          no formula, or no finite answer",
    ]


def test_printed_noise_is_rounded_up_and_printed_steps_are_not_rounded_at_all() -> None:
    noise = text("noise_multiplier", {"tight": 0.71231, "rdp": 1.0, "paper": 1.1})
    assert [line.split()[2:4] for line in noise.splitlines()] == [["≥", "0.7124"], ["≥", "1"], ["≥", "1.1"]]
    steps = text("steps", {"tight": 123_456, "rdp": 99_999, "paper": 7})
    assert [line.split()[1:4] for line in steps.splitlines()] == [
        ["steps", "≤", "123456"],
        ["steps", "≤", "99999"],
        ["steps", "≤", "7"],
    ]


def test_where_no_step_fits_a_way_out_is_said() -> None:
    question, found = answer(noise_multiplier=0.5, epsilon=0.1, delta=1e-5)
    assert found == {"tight": 0, "rdp": 0, "paper": 0}
    lines = text(question, found).splitlines()
    assert lines[0].startswith("tight  steps ≤ 0 ")
    assert lines[-1] == "not even one step fits; add noise, or raise epsilon or delta"
    assert len(text("steps", {"tight": 1, "rdp": 0, "paper": 0}).splitlines()) == 3
