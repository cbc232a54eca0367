"""A config survives TOML unchanged, and a key or value that cannot be is refused with the nearest that can."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from dpfl.config import Config, Settings, parse, read
from dpfl.errors import BadInput
from dpfl.options import literal
from dpfl.systems import SYSTEMS, UDP, FedAvg, FedProx, FedSGD
from grids import each

CONFIGS = [
    *[Config(system(), Settings()) for system in SYSTEMS.values()],  # type: ignore[call-arg]
    Config(
        UDP(
            rounds=7, lr=1e-20, cohort=3, clip=1e16, epsilon=(0.1, 1 / 3, 8.0), delta=(1e-5, 1e-300, 0.5),
            calibration="paper",
        ),
        Settings(
            data="a \"path\"\\with 'quotes', ε and\ta tab", clients=3, partition="dirichlet:0.1", sizes=(400, 600),
            share=0.5, min_records=1, validation_share=0.05, test_share=0.3, model="mlp", evaluate_every=5,
            device="cuda", seed=0, data_seed=2**40, ledger="shared/all clients.sqlite",
        ),
    ),
    Config(FedAvg(sampling_rate=0.015, local_steps=2), Settings(sizes=128, seed=7)),
    Config(FedProx(proximal=0.0, sampling_rate=1.0), Settings(sizes=())),
    Config(FedSGD(lr=0.1 + 0.2), Settings(model="svm")),
]  # fmt: skip


def parsed(config: Config) -> Config:
    return parse(tomllib.loads(config.to_toml()))


@each("config", CONFIGS, ids=lambda config: config.system.name)
def test_toml_loses_nothing(config: Config) -> None:
    assert parsed(config) == config
    assert parsed(config).to_toml() == config.to_toml()
    assert parsed(config).hash == config.hash


def test_every_system_went_through() -> None:
    assert {config.system.name for config in CONFIGS} == set(SYSTEMS)


def test_the_text_is_complete() -> None:
    # Defaults may change from one version to the next; what was run must not.
    table = tomllib.loads(Config(UDP(), Settings()).to_toml())
    assert table["system"] == "udp"
    assert table["epsilon"] == 8.0
    assert table["clients"] == 20
    assert "cohort" not in table  # None has no TOML; leaving it out means the same


def test_the_hash_tells_configs_apart() -> None:
    one = Config(UDP(), Settings(seed=1))
    assert one.hash == Config(UDP(), Settings(seed=1)).hash
    assert (
        len({one.hash, Config(UDP(), Settings(clients=2)).hash, Config(UDP(epsilon=7.0), Settings(seed=1)).hash}) == 3
    )
    # Certificates show it, and whoever tried all seeds would find one that it told apart.
    assert one.hash == Config(UDP(), Settings(seed=2, data_seed=3)).hash == Config(UDP(), Settings()).hash


def test_a_whole_number_in_python_is_the_same_config_as_its_float() -> None:
    whole = Config(UDP(epsilon=8, lr=2), Settings())
    assert parsed(whole) == whole
    assert parsed(whole).hash == whole.hash


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    swept = Config(UDP(epsilon=np.linspace(1, 8, 3)[2], delta=tuple(np.geomspace(1e-5, 1e-3, 2))), Settings())
    assert parsed(swept) == swept


def test_lists_become_tuples_and_whole_numbers_floats() -> None:
    config = parse({"system": "udp", "epsilon": [1, 2.5], "lr": 2, "clients": 2, "sizes": [10, 20]})
    assert config.system == UDP(epsilon=(1.0, 2.5), lr=2.0)
    assert isinstance(config.system.lr, float)
    assert all(isinstance(epsilon, float) for epsilon in config.system.epsilon)
    assert config.settings == Settings(clients=2, sizes=(10, 20))


def test_one_epsilon_is_for_all() -> None:
    assert parse({"system": "udp", "epsilon": 3}).system == UDP(epsilon=3.0)


def test_an_unknown_key_gets_the_nearest_and_everything_that_is_taken() -> None:
    with pytest.raises(BadInput, match=r"^epsilonn must be") as refusal:
        parse({"system": "udp", "epsilonn": 3})
    message = str(refusal.value)
    assert "did you mean 'epsilon'?" in message
    assert (
        "udp takes averaged, batch_size, calibration, clip, clipping, cohort, delta, discount, epsilon, first_clip,"
        in message
    )
    assert "every run takes" in message
    assert all(setting in message for setting in ("partition", "seed", "evaluate_every"))


def test_an_option_of_another_system_is_unknown() -> None:
    with pytest.raises(BadInput, match="epsilon must be a setting or an option of fedavg"):
        parse({"system": "fedavg", "epsilon": 3.0})


@each(
    ("options", "message"),
    [
        ({"rounds": 2.5}, "rounds must be a whole number, was 2.5"),
        ({"rounds": "3"}, "rounds must be a whole number, was '3'"),
        ({"rounds": True}, "rounds must be a whole number, was True"),
        ({"lr": "fast"}, "lr must be a number, was 'fast'"),
        ({"lr": True}, "lr must be a number, was True"),
        ({"epsilon": "a"}, "epsilon must be a number or a list of which each is a number, was 'a'"),
        ({"epsilon": [1.0, "a"]}, "epsilon must be a number, was 'a'"),
        ({"epsilon": [1.0, [2.0]]}, "epsilon must be a number, was [2.0]"),
        ({"calibration": "papr"}, "calibration must be one of paper, tight, was 'papr'; did you mean 'paper'?"),
        ({"calibration": 1}, "calibration must be one of tight, paper, was 1"),
        ({"data": 3}, "data must be a word, was 3"),
        ({"seed": 1.5}, "seed must be a whole number, was 1.5"),
        ({"device": "gpu"}, "device must be one of cpu, cuda, was 'gpu'"),
        ({"sizes": [1, 2.5]}, "sizes must be a whole number, was 2.5"),
        ({"model": {"name": "mlp"}}, "model must be a word"),
        ({"evaluate_every": 0}, "evaluate_every must be a whole number of at least 1, was 0"),
        ({"epsilon": -1}, "epsilon must be a finite number above 0, was -1.0"),
        ({"delta": 2}, "delta must be at least 0 (pure privacy, for Laplace noise) and below 1, was 2.0"),
        ({"delta": 0}, "delta must be above 0 with Gaussian noise, was 0"),
        ({"delta": [1e-3, 0.0]}, "delta must be above 0 with Gaussian noise, was 0"),
        ({"ledger": 3}, "ledger must be a word, was 3"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse({"system": "udp"} | options)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("table", "end"),
    [
        ({"system": "upd"}, "was 'upd'; did you mean 'udp'?"),
        ({}, "was None; name one"),
        ({"system": 3}, "was 3; name one"),
    ],
)
def test_an_unknown_system_gets_the_nearest(table: dict, end: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse(table)
    assert str(refusal.value) == f"system must be one of {', '.join(sorted(SYSTEMS))}, {end}"


def test_parsing_leaves_the_table_alone() -> None:
    table = {"system": "udp", "epsilon": [1, 2]}
    parse(table)
    assert table == {"system": "udp", "epsilon": [1, 2]}


def test_a_file_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('system = "udp"\nepsilon = [1, 2.5]\nnonsense = true\n', encoding="utf-8")
    assert read(path) == {"system": "udp", "epsilon": [1, 2.5], "nonsense": True}


@pytest.mark.parametrize("content", [b"system = udp\n", b"a = 1\na = 2\n", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="config must be TOML") as refusal:
        read(path)
    assert repr(str(path)) in str(refusal.value)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):  # a folder is no file either
        with pytest.raises(BadInput, match="config must be a readable file") as refusal:
            read(path)
        assert repr(str(path)) in str(refusal.value)


@each(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        (".015", 0.015),
        ("+.5", 0.5),
        ("-.5", -0.5),
        ("10.", 10.0),
        ("1.e-5", 1e-5),
        (".1E+2", 10.0),
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        ("-1", -1),
        ("[1, 2.5]", [1, 2.5]),
        ("true", True),
        ("udp", "udp"),
        ('"udp"', "udp"),
        ("dirichlet:0.1", "dirichlet:0.1"),
        ("/data/my folder", "/data/my folder"),
        ("", ""),
        ("[1, 2", "[1, 2"),
        (".", "."),
        (".5.", ".5."),
        ("v.5", "v.5"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_a_literal_is_what_toml_reads_or_a_plain_word(text: str, value: object) -> None:
    assert literal(text) == value
    assert type(literal(text)) is type(value)
