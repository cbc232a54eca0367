"""Settings stand in one list: signatures, config, command line, docs and comparisons are made from it."""

import inspect
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

import dpfl
from dpfl.cli.problem import OF_SYSTEMS
from dpfl.comparison import contenders
from dpfl.config import Config
from dpfl.errors import BadInput
from dpfl.options import option_names
from dpfl.settings import COMPARED, DataSettings, Settings, TrainSettings
from dpfl.systems import SYSTEMS
from dpfl.training import federation_of

# What a config said before there was one list: its text, and with it the hash of a run, must stay.
ORDER = [
    "data", "sites", "schema", "public", "clients", "partition", "sizes", "share", "min_records", "validation_share",
    "test_share", "data_seed",
    "model", "evaluate_every", "backend", "draws", "paid_evaluation", "device", "precision", "seed",
    "sampler", "ledger",
]  # fmt: skip


def test_both_parts_make_one_flat_table_in_the_order_of_a_config() -> None:
    assert [*option_names(DataSettings), *option_names(TrainSettings)] == list(option_names(Settings)) == ORDER
    text = Config(dpfl.UDP(), Settings()).to_toml().partition('data = "digits"\n')[2]
    assert text == (
        'clients = 20\npartition = "iid"\nshare = 1.0\nmin_records = 10\nvalidation_share = 0.1\ntest_share = 0.2\n'
        'evaluate_every = 1\nbackend = "stacked"\ndevice = "cpu"\nprecision = "float32"\n'
    )


@pytest.mark.parametrize("setting", fields(Settings), ids=lambda setting: setting.name)
def test_every_setting_says_what_it_is(setting: Any) -> None:
    assert setting.metadata["help"].endswith(".")
    assert setting.metadata["metavar"]
    assert isinstance(setting.metadata["compared"], bool)


@pytest.mark.parametrize(("function", "kind"), [(dpfl.federate, DataSettings), (dpfl.train, TrainSettings)])
def test_a_signature_shows_every_setting_with_its_default_and_its_help(function: Any, kind: Any) -> None:
    shown = inspect.signature(function).parameters
    assert "settings" not in shown
    for setting in fields(kind):
        assert setting.name in shown
        if setting.name not in ("data", "clients", "model"):  # which are named in Python, and come first
            assert shown[setting.name].default == setting.default
            assert f"{setting.name}: {setting.metadata['help']}" in function.__doc__
    assert list(inspect.signature(dpfl.train).parameters)[:3] == ["system", "federation", "model"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"partitoin": "iid"}, "partitoin must be a setting of federate, .*; did you mean 'partition'\\?$"),
        (
            {"colour": 1},
            "colour must be a setting of federate, .*; it takes data, sites, schema, public, clients, partition,",
        ),
        ({"seed": 1, "data_seed": 2}, "seed must be as data_seed, for which it is short, was 1 and 2; give one$"),
        ({"share": "half"}, "share must be a number, was 'half'"),
    ],
)
def test_python_is_refused_in_one_sentence(given: dict, sentence: str) -> None:
    with pytest.raises(BadInput, match=f"^{sentence}"):
        dpfl.federate("digits", clients=3, **given)


def test_train_knows_its_settings_too() -> None:
    federation = dpfl.federate("digits", clients=2, sizes=20, seed=1)
    with pytest.raises(BadInput, match=r"^ledgr must be a setting of train, .*; did you mean 'ledger'\?$"):
        dpfl.train(dpfl.UDP(), federation, ledgr="mine.sqlite")


def test_a_recipe_is_the_settings_and_shares_out_the_same_again() -> None:
    chosen = Settings(clients=4, sizes=(10, 20), share=0.5, seed=3)
    federation = federation_of(chosen)
    assert federation.recipe == asdict(chosen.of_data)
    assert federation.recipe["data_seed"] == 3
    assert (
        federation.sizes
        == dpfl.federate("digits", clients=4, sizes=[10, 20], share=0.5, seed=3).sizes
        == (5, 5, 10, 10)
    )
    assert federation_of(Settings(seed=3, data_seed=4)).recipe["data_seed"] == 4


def test_a_path_is_a_ledger_too() -> None:
    assert TrainSettings(ledger=Path("a/b.sqlite")).ledger == str(Path("a/b.sqlite"))


OTHERS = {
    "data": "mnist", "clients": 3, "partition": "sorted", "sizes": 5, "share": 0.5, "min_records": 3,
    "validation_share": 0.2, "test_share": 0.3, "model": "mlp", "data_seed": 4, "evaluate_every": 3,
    "backend": "reference", "draws": "client", "device": "cuda", "precision": "tf32", "seed": 9, "sampler": "exact",
    "ledger": "all.sqlite", "paid_evaluation": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_runs_are_compared_only_where_they_share_what_the_list_says(name: str, tmp_path: Path) -> None:
    value = OTHERS[name] if not isinstance(OTHERS[name], str) else f'"{OTHERS[name]}"'
    (tmp_path / "other.toml").write_text(f'system = "udp"\n{name} = {value}\n')
    names = ["udp", str(tmp_path / "other.toml")]
    if name not in COMPARED:
        assert len(contenders(names, {})) == 2
        return
    with pytest.raises(BadInput, match=f"^{name} must be the same in all that is compared"):
        contenders(names, {})


def test_runs_at_sites_are_compared_only_at_the_same_sites(tmp_path: Path) -> None:
    assert OTHERS.keys() == set(option_names(Settings)) - {"sites", "schema", "public"}  # which come together
    for key in ("sites", "schema", "public"):
        here, there = ({"sites": "a", "schema": "a.toml", "public": "a.csv"} | {key: other} for other in ("b", "c"))
        for name, table in (("here", here), ("there", there)):
            lines = "".join(f'{setting} = "{value}"\n' for setting, value in table.items())
            (tmp_path / f"{name}.toml").write_text(f'system = "udp"\n{lines}')
        with pytest.raises(BadInput, match=f"^{key} must be the same in all that is compared"):
            contenders([str(tmp_path / "here.toml"), str(tmp_path / "there.toml")], {})


def test_what_compared_runs_share_is_what_they_shared_before() -> None:
    assert (*ORDER[:11], "model") == COMPARED


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"data": "sites"}, "sites must be given where data is 'sites', were left out; name a folder or files"),
        ({"schema": "s.toml"}, "schema must come with sites, was given without any; add --sites FOLDER"),
        ({"public": "p.csv"}, "public must come with sites, was given without any; add --sites FOLDER"),
        ({"sites": "a", "data": "mnist"}, "data must be left out with sites, which are the data, was 'mnist'"),
        ({"sites": ()}, "sites must name a folder or files, was an empty list; name some, or leave it out"),
        ({"sites": "a", "partition": "sorted"}, "partition must be left out where clients are sites .*, was 'sorted'"),
        ({"data": "heart", "share": 0.5}, "share must be left out where clients are sites .*, was 0.5; leave it out"),
        (
            {"data": "heart", "validation_share": 0.5},
            "validation_share must be .* 0.5; name a public file with --public",
        ),
    ],
)
def test_what_sites_do_not_go_with_is_refused(given: dict, sentence: str) -> None:
    for kind in (DataSettings, Settings):
        with pytest.raises(BadInput, match=f"^{sentence}"):
            kind(**given)


def test_sites_are_the_data_and_say_how_many_there_are() -> None:
    assert Settings(sites=Path("hospitals")).sites == ("hospitals",)
    assert Settings(sites="hospitals").data == "sites"
    assert (Settings().clients, Settings(data="heart").clients, Settings(sites="hospitals").clients) == (20, None, None)


def test_an_option_of_systems_on_the_command_line_is_one_that_a_system_has() -> None:
    known = {name for kind in SYSTEMS.values() for name in option_names(kind)}
    assert OF_SYSTEMS.keys() <= known
    assert not OF_SYSTEMS.keys() & set(option_names(Settings))


def test_the_list_is_read_without_loading_torch() -> None:
    program = "import sys, dpfl.settings, dpfl.cli.run, dpfl.cli.plan, dpfl.cli.compare; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
