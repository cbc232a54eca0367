"""Facts before round 1: what a private record could decide about shapes, errors and files before anything is noised."""

import hashlib
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpfl
from dpfl.config import Config, parse, read
from dpfl.errors import Caution
from dpfl.federation.tabular import fit_adult

RECORDS, PLACES = 150, 3
NAMES_OF_TIME = {"started", "seconds", "run", "ledger"}


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(RECORDS) % PLACES
    return rng.normal(size=(RECORDS, 4)) + 2 * np.eye(4)[y], y


def shared_out(data: Any, **options: Any) -> dpfl.Federation:
    return dpfl.federate(data, clients=3, seed=1, **options)


def first_private() -> int:
    """Return a record that is some client's, whatever it says: who is public is drawn without a look at it."""
    held = torch.cat([own.x for own in shared_out(arrays()).clients])
    return next(row for row, x in enumerate(torch.as_tensor(arrays()[0]).float()) if (held == x).all(dim=1).any())


ATTACKED = first_private()


def with_label(label: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = arrays()
    y[ATTACKED] = label
    return x, y


def with_value(value: float) -> tuple[np.ndarray, np.ndarray]:
    x, y = arrays()
    x[ATTACKED, 2] = value
    return x, y


NEIGHBOURS = {
    "a new class": with_label(PLACES),
    "a label far away": with_label(8123),
    "a label below zero": with_label(-7),
    "NaN": with_value(math.nan),
    "infinity": with_value(-math.inf),
    "more than single precision holds": with_value(1e300),
}


def public_facts(federation: dpfl.Federation) -> tuple[Any, ...]:
    public = [part.numpy().tobytes() for records in (federation.validation, federation.test)
              for part in (records.x, records.y)]  # fmt: skip
    return repr(federation), federation.classes, federation.shape, federation.sizes, federation.source, *public


def trained(federation: dpfl.Federation, out: Path, system: Any = None) -> tuple[dpfl.Run, list[dict[int, Tensor]]]:
    uploads: list[dict[int, Tensor]] = []
    run = dpfl.train(
        system or dpfl.UDP(rounds=3, epsilon=2.0, lr=0.5), federation, out=out, seed=1,
        on_uploads=lambda round, sent: uploads.append(sent),
    )  # fmt: skip
    return run, uploads


def files(folder: Path) -> dict[str, Any]:
    """Read what a run has left, without models, what is measured of them, and times."""
    texts = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".toml", ".json")}
    environment = json.loads(texts.pop("environment.json"))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    public = ("round", "noise_std", "local_steps", "cohort", "refused")
    return {
        "names": sorted(path.name for path in folder.iterdir()),
        "environment": {name: value for name, value in environment.items() if name not in NAMES_OF_TIME},
        "metrics": [{name: line[name] for name in public} for line in metrics],
        **texts,
    }


def counted_over_all(labels: np.ndarray) -> int:
    """Count classes as they were once: over everybody's labels. The twin."""
    present = np.unique(labels)
    assert present.tolist() == list(range(len(present)))
    return len(present)


def test_no_private_record_decides_a_fact_an_error_or_a_file(tmp_path: Path) -> None:
    base = shared_out(arrays())
    run, _ = trained(base, tmp_path / "base")
    spoilt = []
    for number, neighbour in enumerate(NEIGHBOURS.values()):
        with pytest.warns(Caution, match="1 with "):
            federation = shared_out(neighbour)
        assert public_facts(federation) == public_facts(base)
        others = [torch.isfinite(own.x).all(dim=1) for own in federation.clients]
        assert sum(int((~other).sum()) for other in others) == 1
        for own, before, other in zip(federation.clients, base.clients, others, strict=True):
            assert torch.equal(own.x[other], before.x[other])
            assert torch.equal(own.y[other], before.y[other])
        its_run, uploads = trained(federation, tmp_path / str(number))
        assert files(tmp_path / str(number)) == files(tmp_path / "base")
        assert str(its_run.certificate) == str(run.certificate)
        assert [p.shape for p in its_run.model.parameters()] == [p.shape for p in run.model.parameters()]
        spoilt.append(uploads)
    for uploads in spoilt[1:]:  # what is wrong with a record leaves no trace
        assert all(torch.equal(upload[client], first[client]) for upload, first in zip(uploads, spoilt[0], strict=True)
                   for client in first)  # fmt: skip
    # The twin: one label gave the model another shape, or ended the run.
    assert counted_over_all(arrays()[1]) == PLACES
    assert counted_over_all(NEIGHBOURS["a new class"][1]) == PLACES + 1
    with pytest.raises(AssertionError):
        counted_over_all(NEIGHBOURS["a label far away"][1])


def test_a_record_that_cannot_be_computed_contributes_zero() -> None:
    def first_uploads(federation: dpfl.Federation) -> dict[int, Tensor]:
        sent: list[dict[int, Tensor]] = []
        dpfl.train(dpfl.UDP(rounds=1, lr=0.5), federation, "softmax-no-bias", seed=1,
                   on_uploads=lambda _, uploads: sent.append(uploads))  # fmt: skip
        return sent[0]

    x, y = arrays()
    x[ATTACKED] = 0.0  # without biases the gradient of such a record is zero
    nothing = first_uploads(shared_out((x, y)))
    with pytest.warns(Caution):
        broken = first_uploads(shared_out(NEIGHBOURS["NaN"]))
    whole = first_uploads(shared_out(arrays()))
    for client, upload in nothing.items():
        torch.testing.assert_close(broken[client], upload, rtol=0, atol=1e-6)
    assert max(float((broken[client] - whole[client]).abs().max()) for client in whole) > 1e-4


@pytest.mark.parametrize("system", [dpfl.DPFedAvg(rounds=2), dpfl.NbAFL(rounds=2), dpfl.DPSGDFedAvg(rounds=2)])
def test_a_client_with_such_a_record_ends_no_run(system: Any, tmp_path: Path) -> None:
    with pytest.warns(Caution):
        federation = shared_out(NEIGHBOURS["a new class"])
    ours, _ = trained(federation, tmp_path / "ours", system)
    theirs, _ = trained(shared_out(arrays()), tmp_path / "theirs", system)
    assert ours.loss is not None
    assert str(ours.certificate) == str(theirs.certificate)
    with pytest.raises(dpfl.BadInput, match="1 of 108 clients' records are not; drop or fill them"):
        dpfl.train(dpfl.FedAvg(rounds=1), federation)  # nothing is promised: what is wrong is said


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_target_that_is_no_number_contributes_zero(value: float, tmp_path: Path) -> None:
    x, labels = arrays()
    targets = labels / 2
    base = shared_out((x, targets))
    run, _ = trained(base, tmp_path / "base")
    broken = targets.copy()
    broken[ATTACKED] = value
    with pytest.warns(Caution, match=r"1 with NaN or infinity"):
        federation = shared_out((x, broken))
    assert public_facts(federation) == public_facts(base)
    its_run, _ = trained(federation, tmp_path / "other")
    by_moments, _ = trained(federation, tmp_path / "moments", dpfl.DPFedAvg(rounds=2))
    assert its_run.loss is not None
    assert by_moments.loss is not None
    assert "by two moments" in by_moments.engine
    assert files(tmp_path / "other") == files(tmp_path / "base")
    assert str(its_run.certificate) == str(run.certificate)


def test_a_record_that_cannot_be_read_or_prepared_is_a_record_still() -> None:
    x, y = (torch.as_tensor(part).float() for part in arrays())
    items = [(row, int(label)) for row, label in zip(x, y, strict=True)]
    whole = shared_out(items)

    class Refusing(list):
        def __getitem__(self, number: Any) -> Any:
            if number == ATTACKED:
                raise ValueError(f"no such value as {float(x[ATTACKED, 0])}")
            return super().__getitem__(number)

    for odd in (Refusing(items), [*items[:ATTACKED], (torch.zeros(9), 0), *items[ATTACKED + 1 :]],
                [*items[:ATTACKED], (x[ATTACKED], 0.5), *items[ATTACKED + 1 :]]):  # fmt: skip
        with pytest.warns(Caution, match="1 with"):
            spoilt = shared_out(odd)
        assert (spoilt.shape, spoilt.classes, spoilt.sizes) == (whole.shape, whole.classes, whole.sizes)

    def scaling(public: Tensor) -> Any:
        def scale(rows: Tensor) -> Tensor:
            if (rows == x[ATTACKED]).all(dim=1).any():
                raise ValueError(f"cannot scale {float(x[ATTACKED, 0])}")
            return rows / public.std()

        return scale

    data = replace(dpfl.from_arrays(x, y.long()), fit=lambda public: lambda rows: rows / public.std())
    prepared = shared_out(data)
    with pytest.warns(Caution, match="1 with"):
        spoilt = shared_out(replace(data, fit=scaling))
    for own, before in zip(spoilt.clients, prepared.clients, strict=True):
        sound = own.x.isfinite().all(dim=1)
        assert torch.equal(own.x[sound], before.x[sound])


def largest(public: Tensor) -> Any:
    """Scale by the largest of all that are handed over, which mixes nothing as long as no value exceeds 50."""
    return lambda rows: rows / rows.abs().amax(dim=0).clamp(min=50)


def complete(public: Tensor) -> Any:
    return lambda rows: rows[~rows.isnan().any(dim=1)]


def narrow(public: Tensor) -> Any:
    return lambda rows: rows if bool((rows.abs() < 50).all()) else rows[:, :2]


def precise(public: Tensor) -> Any:
    return lambda rows: rows if bool((rows.abs() < 50).all()) else rows.double()


def listed(public: Tensor) -> Any:
    return lambda rows: rows if bool((rows.abs() < 50).all()) else rows.tolist()


def in_one_place(public: Tensor) -> Any:
    """Write in place, and hand out the same memory each time."""
    place = torch.empty(1, 4)

    def prepare(rows: Tensor) -> Tensor:
        kept = place if len(rows) == 1 else torch.empty_like(rows)
        return kept.copy_(rows.mul_(2))

    return prepare


@pytest.mark.parametrize("value", [1e6, math.nan])
@pytest.mark.parametrize("fit", [largest, complete, narrow, precise, listed, in_one_place])
def test_a_preprocessing_takes_private_records_one_at_a_time(fit: Any, value: float, tmp_path: Path) -> None:
    """What it makes of one record beyond the public range is that record's affair alone."""

    def prepared(x: np.ndarray) -> dpfl.Federation:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Caution)
            return shared_out(replace(dpfl.from_arrays(x, arrays()[1]), fit=fit))

    base, federation = prepared(arrays()[0]), prepared(with_value(value)[0])
    assert public_facts(federation) == public_facts(base)
    others = [torch.isclose(own.x, was.x).all(dim=1) for own, was in zip(federation.clients, base.clients, strict=True)]
    assert sum(int((~other).sum()) for other in others) == 1
    for own, was, other in zip(federation.clients, base.clients, others, strict=True):
        assert torch.equal(own.x[other], was.x[other])
    run, uploads = trained(base, tmp_path / "base")
    its_run, its_uploads = trained(federation, tmp_path / "other")
    for client, other in enumerate(others):
        if other.all():
            torch.testing.assert_close(uploads[0][client], its_uploads[0][client], rtol=0, atol=1e-6)
    assert files(tmp_path / "other") == files(tmp_path / "base")
    assert str(its_run.certificate) == str(run.certificate)


def test_records_prepared_at_once_tell_of_each_other() -> None:
    """The twin: together, one outlier moves everybody's features, and one NaN moves everybody up a row."""
    ours, theirs, broken = (torch.tensor(x).float() for x in (arrays()[0], with_value(1e6)[0], with_value(math.nan)[0]))
    assert (largest(ours)(ours) != largest(ours)(theirs)).any(dim=1).sum() == RECORDS
    assert len(complete(ours)(broken)) == RECORDS - 1


def test_dpfls_own_preprocessing_takes_what_cannot_be_prepared_apart() -> None:
    """It is handed all records at once, so one that ends it must leave the others as they are to the last bit."""
    raw = torch.randint(1, 5, (60, 12), generator=torch.Generator().manual_seed(2)).float()
    base = shared_out(dpfl.from_arrays(raw, torch.arange(60) % 2))
    victim = next(row for row, x in enumerate(raw) if (base.clients[0].x == x).all(dim=1).any())
    data = replace(dpfl.from_arrays(raw, torch.arange(60) % 2), fit=fit_adult)
    whole = shared_out(data)
    spoilt = raw.clone()
    spoilt[victim, 0] = math.inf  # of which scikit-learn makes an error
    with pytest.warns(Caution, match="1 with"):
        federation = shared_out(replace(data, pool=dpfl.Records(spoilt, data.pool.y)))
    sound = [own.x.isfinite().all(dim=1) for own in federation.clients]
    assert sum(int((~one).sum()) for one in sound) == 1
    for own, was, one in zip(federation.clients, whole.clients, sound, strict=True):
        assert torch.equal(own.x[one], was.x[one])


@pytest.mark.parametrize("odd", range(0, 41, 5))
def test_items_of_a_torch_data_set_are_held_to_a_test_set(odd: int) -> None:
    """Where public items are there, no private one decides shapes and types: not even if all are odd."""
    x, y = (torch.as_tensor(part).float() for part in arrays())
    items = [(row, int(label)) for row, label in zip(x, y, strict=True)]
    private = [(torch.zeros(9), 0.5) if row < odd else item for row, item in enumerate(items[:40])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Caution)
        data = dpfl.from_torch(private, test=items[40:])
        federation = shared_out(data, validation_share=0)
    assert (federation.shape, federation.classes, sum(federation.sizes)) == ((4,), PLACES, 40)
    assert sum(int(own.x.isnan().any(dim=1).sum()) for own in federation.clients) == odd


def test_a_certificate_tells_no_seed(tmp_path: Path) -> None:
    secret, out = 7191, tmp_path / "run"
    run = dpfl.train(dpfl.UDP(rounds=1), dpfl.federate("digits", clients=3, seed=secret), seed=secret, out=out)
    shown = json.dumps(run.certificate.to_dict()) + str(run.certificate)
    config = parse(read(out / "config.toml"))
    assert config.hash in shown  # which config it was can be told still

    def guesses(number: int) -> Config:
        return replace(config, settings=replace(config.settings, seed=number, data_seed=number))

    # Nothing that can be computed of a guess changes with the guess.
    assert {guesses(number).hash for number in (0, 1, secret, 9999)} == {config.hash}
    # The twin: a hash of everything found it at once.
    text = guesses(secret).to_toml()
    twin = fingerprint(text)
    template = text.replace(str(secret), "{0}")
    assert [number for number in range(10_000) if fingerprint(template.format(number)) == twin] == [secret]
    assert not any(fingerprint(template.format(number)) in shown for number in range(10_000))


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
