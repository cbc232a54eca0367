"""Training: walk the hall R times, keep the run folder, end with a certificate."""

import hashlib
import json
import math
import platform
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dpfl import __version__, run_folder
from dpfl.clients.backends import MakeClients, make_clients
from dpfl.clients.uploads import Clients, Engine
from dpfl.config import Config
from dpfl.errors import BadInput, Caution
from dpfl.federation import Federation, federate
from dpfl.federation.facts import require_usable
from dpfl.models import Loss, Model, build, default_model
from dpfl.models.losses import squared_error
from dpfl.orders import Gaussian, Neighbours
from dpfl.paid_evaluation import (
    accuracies,
    counting_system,
    noise_of,
    require_countable,
    to_be_counted,
    without_tests,
)
from dpfl.precision import products
from dpfl.privacy.books import FAST, Books
from dpfl.privacy.budget import cautions
from dpfl.privacy.certificate import Certificate, certify
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.people import Fingerprints, fingerprint, fingerprints_of
from dpfl.rehearsal import allowance
from dpfl.report import frames, notebook
from dpfl.round import Outcome, walk
from dpfl.server.at_sites import SiteResult, results_of
from dpfl.server.evaluation import PublicSplit, Score, evaluate
from dpfl.session import OnUploads, Session, follows_uploads, problem_of
from dpfl.settings import Settings, TrainSettings, read, takes
from dpfl.streams import Streams, fresh_seed
from dpfl.systems import System

if TYPE_CHECKING:
    from pandas import DataFrame


class RoundMetrics(TypedDict):
    """One line of the log. Losses and accuracies are None in rounds after which nobody looked."""

    round: int
    loss: float | None  # on the test split, for reporting only; None, too, where it is not finite
    accuracy: float | None  # likewise; None for regression
    validation_loss: float | None  # on the public split
    validation_accuracy: float | None
    noise_std: float | None  # mean over the cohort; None without Gaussian noise
    local_steps: int
    cohort: int  # clients that uploaded
    refused: list[int]  # clients whose budgets could not pay


OnRound = Callable[[RoundMetrics], None]
OnOpen = Callable[[Session[Any]], None]

_OWN = "# Data, model or clients were handed over in Python: repeat this run from there.\n"
_HELD_OUT = "records that sites keep for testing"
_SLOW = 3.0  # times a plain step, from which on a fall-back is worth a word


@dataclass(frozen=True)
class Run:
    """A finished training."""

    system: str
    rounds: int
    accuracy: float | None  # on the test split, after the last round; None for regression
    loss: float | None  # likewise; None where the model diverged
    seconds: float
    history: list[RoundMetrics]
    certificate: Certificate
    engine: str  # how clients trained, and why
    out: Path | None
    model: nn.Module  # holds the trained parameters
    sites: tuple[SiteResult, ...] = ()  # of clients that have names
    evaluation: Certificate | None = None  # of what sites paid to be evaluated, besides the training

    def to_dict(self) -> dict[str, Any]:
        """Return what `dpfl run --json` prints."""
        return {
            "system": self.system,
            "rounds": self.rounds,
            "steps_per_round": [metrics["local_steps"] for metrics in self.history],
            "accuracy": self.accuracy,
            "loss": self.loss,
            "seconds": self.seconds,
            "history": self.history,
            "certificate": self.certificate.to_dict(),
            **({"sites": [asdict(site) for site in self.sites]} if self.sites else {}),
            **({} if self.evaluation is None else {"evaluation": self.evaluation.to_dict()}),
            "engine": self.engine,
            "out": None if self.out is None else str(self.out),
        }

    def to_frame(self) -> "DataFrame":
        """Return the history as a pandas frame, a row for each round."""
        return frames.frame(frames.rounds(self.history))

    def to_csv(self, path: str | Path) -> None:
        """Write the history as CSV, a line for each round."""
        frames.write(frames.rounds(self.history), path)

    def _repr_html_(self) -> str:
        return notebook.run(self.to_dict())


def run(
    config: Config,
    *,
    out: Path | None = None,
    force: bool = False,
    on_open: OnOpen | None = None,
    on_round: OnRound | None = None,
) -> Run:
    """Carry out a config from data to certificate."""
    settings = config.settings
    if out is not None:
        run_folder.claim(out, force=force)  # before the data is loaded, which can take a while
    return train(
        config.system,
        federation_of(settings),
        out=out,
        force=force,
        on_open=on_open,
        on_round=on_round,
        **asdict(settings.of_training),
    )


def settled(settings: Settings) -> Settings:
    """Return settings that share the data out in the same way whenever they are carried out.

    Without a seed every sharing-out is another: what a plan took for public would be clients' in the run that follows.
    """
    if settings.seed is not None or settings.data_seed is not None:
        return settings
    return replace(settings, data_seed=fresh_seed())


def federation_of(settings: Settings) -> Federation:
    """Share the data out as the settings say."""
    return federate(**asdict(settings.of_data))


@takes(TrainSettings)
def train(
    system: System[Any],
    federation: Federation,
    model: str | nn.Module | None = None,
    *,
    loss: Loss | None = None,
    clients: Clients | MakeClients | None = None,
    evaluate_after: Collection[int] = (),
    out: str | Path | None = None,
    force: bool = False,
    on_open: OnOpen | None = None,
    on_round: OnRound | None = None,
    on_uploads: OnUploads | None = None,
    **settings: Any,
) -> Run:
    """Train `model` over the federation's clients by the rules of `system`.

    model: a name, an `nn.Module` (then `loss` maps its outputs and the targets to one value a record or to their mean),
        or None for the one that fits the data. A module is trained in place.
    clients: who performs the orders, instead of a backend; or a function that makes them of the model, each client's
        records and the run's streams.
    evaluate_after: rounds after which to look at the public validation and the test split as well as every
        `evaluate_every`; a system that watches its training looks at the former after every round.
    out: folder to keep the run in; an existing one is refused unless `force`.
    on_open: called with the session before the first round.
    on_round: called with the metrics of each round.
    on_uploads: called with each round's number and the upload of every client, noise included, as an audit needs
        them; without it only their weighted sum is formed where that is all the system looks at.

    Raises BadInput before anything is written, and BudgetRefused where the clients' budgets end the training early.
    """
    chosen = read(TrainSettings, settings, by="train")
    streams = Streams(chosen.seed, sampler=chosen.sampler)
    learner = as_model(model, loss, federation, streams)
    whole = federation
    if chosen.paid_evaluation is not None:  # then nobody looks at sites' test records for nothing
        require_countable(federation, learner)
        federation = without_tests(federation)
    target = as_device(chosen.device)
    folder = None if out is None else Path(out)
    if folder is not None:
        run_folder.claim(folder, force=force)
    learner.module.to(target)
    records = tuple(records.to(target) for records in federation.clients)
    validation, test = federation.validation.to(target), federation.test.to(target)
    if clients is not None:
        performers = clients(learner, records, streams) if callable(clients) else clients
    else:
        tried = federation.example.to(target)
        made = make_clients(chosen.backend, learner, records, streams, public=tried, drawn_by=chosen.draws)
        performers, chosen = made, replace(chosen, draws=made.drawn_by)
    engine, promise = performers.engine, system.promise(federation.sizes)
    config = Config(system, settings_of(federation, **asdict(_portable(chosen)) | {"model": learner.name}))
    if promise is None:
        require_usable(federation)
    environment = _environment(federation, chosen.device, engine, streams)
    shared = chosen.ledger is not None
    ledger_in = partial(
        Ledger, promise, federation.sizes, system=system.name, config=config.hash, seeded=streams.seeded,
        noise_source=_noise_source(streams) or ("the clients that were handed in" if clients is not None else None),
        follows_uploads=follows_uploads(system), versions=environment["versions"],
        allowed=allowance(system, federation.sizes, streams),
        sharing=_sharing(federation), names=federation.names,
        held_out=_HELD_OUT if federation.site_tests else None,
        # What is evaluated later is charged to the same people.
        recognise=partial(_recognise, federation, streams) if shared or chosen.paid_evaluation is not None else None,
    )  # fmt: skip
    session = Session(
        system, problem_of(system, federation.sizes, learner.dim, streams), learner, performers,
        ledger_in(books=None if chosen.ledger is None else Books(Path(chosen.ledger), create=False)), streams,
        PublicSplit(learner, validation), on_uploads, config.simulated,
    )  # fmt: skip
    state = session.begin()
    if chosen.ledger is None:  # what cannot begin leaves nothing behind: only now is a new ledger made
        session = replace(session, ledger=ledger_in(books=_books(folder)))
    doubts = () if promise is None else cautions(promise, federation.sizes, federation.names)
    for caution in (*doubts, *_slow(engine)):
        warnings.warn(caution, Caution, stacklevel=2)

    started = time.perf_counter()
    environment["ledger"] = run_folder.EXTRACT if shared else run_folder.LEDGER
    environment["run"] = session.ledger.run.name  # as the ledger knows it
    if folder is not None:
        named = federation.recipe is not None and not isinstance(model, nn.Module) and clients is None
        note = "" if named else _OWN
        run_folder.create(folder, note + config.to_toml())
        run_folder.write_json(folder, run_folder.ENVIRONMENT, environment)
    history: list[RoundMetrics] = []
    try:
        if on_open is not None:
            on_open(session)
        with products(chosen.precision):
            for reached, outcome in walk(session, state):
                state = reached
                looked_at = state.round % chosen.evaluate_every == 0 or state.round in evaluate_after
                # A round after which nobody can pay was the last one, and that is known only afterwards.
                due = looked_at or state.round >= state.rounds or system.until_spent
                known = outcome.public or (evaluate(learner, state.model, validation) if due else None)
                reported = evaluate(learner, state.model, test) if due else None
                history.append(metrics_of(state.round, outcome, known, reported))
                if folder is not None:
                    run_folder.append_metrics(folder, dict(history[-1]))
                if on_round is not None:
                    on_round(history[-1])
    finally:  # whatever ended it: what was spent is certified and what was learned is kept
        seconds = time.perf_counter() - started
        learner.load(state.model)
        books = session.ledger.books
        certificate = certify(books, session.ledger.run)
        sites = results_of(federation, learner, state.model, certificate)
        if folder is not None:
            _save(folder, learner, state.model, certificate, environment | {"seconds": round(seconds, 3)})
            if sites:
                run_folder.write_json(folder, run_folder.SITES, {"sites": [asdict(site) for site in sites]})
        if folder is not None and shared:
            books.extract(session.ledger.run, folder / run_folder.EXTRACT)
        books.close()
    evaluation = None
    if chosen.paid_evaluation is not None:
        paid_from = chosen.ledger if shared or folder is None else str(folder / run_folder.LEDGER)
        evaluation, sites = _pay_for_evaluation(
            whole, learner, state.model, sites, replace(chosen, ledger=paid_from),
            "replace" if promise is None else promise.neighbours,
        )  # fmt: skip
        if folder is not None:
            run_folder.write_json(folder, run_folder.EVALUATION, evaluation.to_dict())
            run_folder.write_json(folder, run_folder.SITES, {"sites": [asdict(site) for site in sites]})
    return Run(
        system=system.name,
        rounds=state.round,
        accuracy=history[-1]["accuracy"],
        loss=history[-1]["loss"],
        seconds=seconds,
        history=history,
        certificate=certificate,
        engine=str(engine),
        out=folder,
        model=learner.module,
        sites=sites,
        evaluation=evaluation,
    )


def _pay_for_evaluation(
    federation: Federation,
    learner: Model,
    parameters: Tensor,
    sites: Sequence[SiteResult],
    settings: TrainSettings,
    neighbours: Neighbours,
) -> tuple[Certificate, tuple[SiteResult, ...]]:
    """Have every site upload a noised count of what the model gets right, charged to the same ledger as the training.

    The count is of records that trained nothing, at the δ that was granted for the training (10⁻³ where that is 0).
    """
    counted, counting = to_be_counted(learner, parameters, federation)
    deltas = tuple(site.delta or 1e-3 for site in sites)
    assert settings.paid_evaluation is not None
    system = counting_system(settings.paid_evaluation, deltas, neighbours)
    streams = Streams(settings.seed).part("evaluation", 0)
    # A seed of its own, since noise that was drawn before would cancel out.
    seed = None if settings.seed is None else int.from_bytes(streams.public.key[:7], "little")
    uploads: dict[int, Tensor] = {}
    run = train(
        system, counted, counting, loss=squared_error, ledger=settings.ledger, seed=seed,
        sampler=settings.sampler, on_uploads=lambda _, found: uploads.update(found),
    )  # fmt: skip
    noise = noise_of(system, counted.sizes, streams)
    found = zip(sites, accuracies(uploads, len(sites)), noise, federation.site_tests, strict=True)
    return run.certificate, tuple(
        replace(site, accuracy=accuracy, accuracy_noise=std, tested=len(tests))
        for site, accuracy, std, tests in found
    )  # fmt: skip


def as_model(model: str | nn.Module | None, loss: Loss | None, federation: Federation, streams: Streams) -> Model:
    """Build the named model for a federation, or wrap a module with its loss."""
    if not isinstance(model, nn.Module):
        if loss is not None:
            raise BadInput("loss must come with a module of your own, was given for a named model; leave it out")
        name = model or default_model(federation.name, federation.classes)
        return build(name, shape=federation.shape, classes=federation.classes, rng=streams.public.generator("model"))
    if loss is None:
        raise BadInput("loss must be given with a module of your own, was None; pass torch's cross_entropy, say")
    return Model(model, loss, classify=None if federation.classes is None else lambda outputs: outputs.argmax(-1))


def _books(folder: Path | None) -> Books:
    if folder is None:
        return Books()
    run_folder.make(folder)
    return Books(folder / run_folder.LEDGER)


def settings_of(federation: Federation, **choices: Any) -> Settings:
    """Return settings that share the data out as this federation does; data that was handed over is only named."""
    recipe = federation.recipe or {"data": federation.name, "clients": len(federation.clients)}
    return Settings(**recipe, **choices)


def as_device(name: str) -> torch.device:
    """Return a device that is there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device must be one that torch can use here, was 'cuda' and no GPU is visible; use cpu")
    return torch.device(name)


def metrics_of(round: int, outcome: Outcome, public: Score | None, test: Score | None) -> RoundMetrics:
    """Return one line of the log."""
    orders = list(outcome.orders.values())
    stds = [order.noise.std for order in orders if isinstance(order.noise, Gaussian)]
    return {
        "round": round,
        "loss": None if test is None else _finite(test.loss),
        "accuracy": None if test is None else test.accuracy,
        "validation_loss": None if public is None else _finite(public.loss),
        "validation_accuracy": None if public is None else public.accuracy,
        "noise_std": sum(stds) / len(stds) if stds else None,
        "local_steps": max((order.steps for order in orders), default=0),
        "cohort": len(outcome.answered),
        "refused": list(outcome.refused),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _slow(engine: Engine) -> tuple[str, ...]:
    """Say where a fall-back costs much, and the way out of it."""
    if engine.cost is None or engine.cost <= _SLOW:
        return ()
    return (
        f"clients train {engine.name}, and gradients of records take about {engine.cost:.0f} times as long as that of"
        f" their batch, because {engine.why}; to be faster, {engine.way_out}",
    )


def _environment(federation: Federation, device: str, engine: Engine, streams: Streams) -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "numpy", "scipy", "dp-accounting") if _installed(name)}
    environment: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "dpfl": __version__} | packages,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "data": federation.source,
        "engine": str(engine),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if not streams.seeded:  # of cohorts and first parameters: nothing secret follows from it, but from a seed it would
        environment["public_root"] = streams.public.key.hex()
    return environment


def _portable(settings: TrainSettings) -> TrainSettings:
    """Return settings that name no place on this machine, for the folder that is handed around."""
    if settings.ledger is None or not Path(settings.ledger).is_absolute():
        return settings
    return replace(settings, ledger=Path(settings.ledger).name)


def _sharing(federation: Federation) -> str | None:
    """Name how the data were shared out among the clients, where that can be told and done again."""
    recipe = federation.recipe
    if recipe is None or recipe["data_seed"] is None:
        return None
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _recognise(federation: Federation, streams: Streams, key: bytes) -> Fingerprints:
    """Make what a ledger with this key knows a run's people and noise by."""
    as_they_are = *federation.clients, federation.validation, federation.test
    people = as_they_are if federation.untouched is None else federation.untouched()
    *clients, validation, test = (
        fingerprints_of(key, records.x.cpu().numpy(), records.y.cpu().numpy()) for records in people
    )
    return Fingerprints(clients, [*validation, *test], fingerprint(key, streams.secret.key))


def _noise_source(streams: Streams) -> str | None:
    """Say where noise comes from, if neither from a seed nor, exactly, from the operating system."""
    return FAST if streams.fast and not streams.seeded else None


def _installed(package: str) -> bool:
    """Say whether a package is there: dp-accounting is needed only where something sampled is priced."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _save(
    folder: Path, model: Model, parameters: Tensor, certificate: Certificate, environment: dict[str, Any]
) -> None:
    save_file({name: value.cpu().contiguous() for name, value in model.split(parameters).items()},
              folder / run_folder.MODEL)  # fmt: skip
    run_folder.write_json(folder, run_folder.CERTIFICATE, certificate.to_dict())
    run_folder.write_json(folder, run_folder.ENVIRONMENT, environment)
