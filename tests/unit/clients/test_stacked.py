"""The stacked clients: together or apart, in any order, memory and number of threads, they do what is ordered."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.asking import request, sum_of, uploads_of
from dpfl.clients import stacked
from dpfl.clients.pool import Pool
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Separate, Summed
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities, capabilities_of
from dpfl.models import Model, build
from dpfl.models.architectures import cross_entropy, squared_error
from dpfl.orders import ClientClip, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip
from dpfl.privacy.ledger import Charged
from dpfl.server.aggregation import aggregate
from dpfl.streams import Streams
from grids import each

FEATURES, CLASSES, SIZES = 5, 3, (7, 4, 7, 12, 1, 7)


@pytest.fixture(autouse=True)
def same_layers() -> Iterator[None]:
    torch.manual_seed(0)  # torch's own layers fill themselves
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def records(*shape: int, sizes: tuple[int, ...] = SIZES) -> tuple[Records, ...]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), *(shape or (FEATURES,)), generator=source, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (len(x),), generator=source)
    return tuple(map(Records, torch.split(x, sizes), torch.split(y, sizes)))


def public(*shape: int) -> Records:
    source = torch.Generator().manual_seed(2)
    x = torch.randn(8, *(shape or (FEATURES,)), generator=source, dtype=torch.float64)
    return Records(x, torch.arange(8) % CLASSES)


def mlp() -> Model:
    return Model(nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double(), cross_entropy)


def clients(model: Model, data: tuple[Records, ...], seen: Records | None = None, seed: int = 0) -> StackedClients:
    found = capabilities_of(model, seen or public())
    assert found.layers is not None
    return StackedClients(model, data, Streams(seed), capabilities=found)


def paid(order: Order | Mapping[int, Order], who: tuple[int, ...] = tuple(range(len(SIZES)))) -> dict[int, Charged]:
    each = order if isinstance(order, Mapping) else dict.fromkeys(who, order)
    return {client: Charged(each[client], SIZES[client]) for client in who}


def rows(uploads: Mapping[int, Tensor]) -> Tensor:
    return torch.stack([uploads[client] for client in sorted(uploads)])


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


WEIGHTS = {client: 0.1 + client for client in range(len(SIZES))}

ORDERS = {
    "plain": Order(steps=1, learning_rate=0.5),
    "several steps": Order(steps=3, learning_rate=(0.5, 0.2, 0.1)),
    "proximal": Order(steps=3, learning_rate=0.5, proximal=0.3),
    "records clipped": Order(steps=1, learning_rate=0.5, clip=RecordClip(0.3)),
    "records clipped in L1": Order(steps=3, learning_rate=0.5, clip=RecordClip(0.8, 1)),
    "clients clipped": Order(steps=2, learning_rate=0.5, clip=ClientClip(0.1)),
    "clients clipped in L1": Order(steps=1, learning_rate=0.5, clip=ClientClip(0.3, 1)),
    "models clipped": Order(steps=2, learning_rate=0.5, clip=ModelClip(0.5)),
    "everything": Order(steps=3, learning_rate=(0.5, 0.4, 0.3), clip=RecordClip(0.3), proximal=0.2),
}
SAMPLED = {
    "sampled": Order(steps=2, learning_rate=0.5, batch=Poisson(0.4)),
    "sampled and clipped": Order(steps=3, learning_rate=0.5, batch=Poisson(0.4), clip=RecordClip(0.3)),
    "noise on steps": Order(
        steps=3, learning_rate=0.5, batch=Poisson(0.4), clip=RecordClip(0.3), noise=Gaussian(0.2), noise_on="step"
    ),
    "noise on a clients step": Order(
        steps=2, learning_rate=0.5, batch=Poisson(0.4), clip=ClientClip(0.3), noise=Gaussian(0.2), noise_on="step"
    ),
    "Laplace on the upload": Order(steps=2, learning_rate=0.5, clip=RecordClip(0.3, 1), noise=Laplace(0.2)),
    "Gaussian on the model": Order(steps=2, learning_rate=0.5, clip=ModelClip(0.3), noise=Gaussian(0.2)),
}  # fmt: skip


def mixed(first: Order) -> dict[int, Order]:
    """Return orders of one kind, and some of others, that differ from client to client."""
    rates = tuple(0.5 * rate for rate in first.learning_rates)
    other = replace(first, learning_rate=rates, clip=first.clip and replace(first.clip, clip_norm=0.07))
    return {0: first, 1: other, 2: ORDERS["plain"], 3: other, 4: first, 5: SAMPLED["sampled and clipped"]}


# Apart.


@each("name", ORDERS | SAMPLED)
def test_every_client_uploads_what_the_reference_client_uploads(name: str) -> None:
    model, data = mlp(), records()
    for order in ((ORDERS | SAMPLED)[name], mixed((ORDERS | SAMPLED)[name])):
        theirs = uploads_of(ReferenceClients(model, data, Streams(0)), paid(order), model.vector(), 2)
        ours = uploads_of(clients(model, data), paid(order), model.vector(), 2)
        assert list(ours) == list(theirs)
        assert_close(rows(ours), rows(theirs))


@pytest.mark.parametrize("name", ["linear", "svm", "softmax", "mlp", "udp-cnn", "ali-cnn", "femnist-cnn-small"])
def test_the_papers_models(name: str) -> None:
    classes = None if name == "linear" else 2 if name == "svm" else CLASSES
    shape = (1, 14, 14) if "cnn" in name else (FEATURES,)
    model = build(name, shape=shape, classes=classes, rng=Streams(0).public.generator("model"))
    model.module.double()

    def fitting(batch: Records) -> Records:
        return Records(batch.x, batch.x.flatten(1).sum(dim=1) if classes is None else batch.y % classes)

    data, seen = tuple(map(fitting, records(*shape, sizes=SIZES[:3]))), fitting(public(*shape))
    ours = clients(model, data, seen)
    for order in (
        ORDERS["everything"], ORDERS["plain"], ORDERS["clients clipped"], SAMPLED["noise on steps"], SAMPLED["sampled"],
    ):  # fmt: skip
        few = paid(order, (0, 1, 2))
        theirs = rows(uploads_of(ReferenceClients(model, data, Streams(0)), few, model.vector(), 1))
        assert_close(rows(uploads_of(ours, few, model.vector(), 1)), theirs)
        if order in ORDERS.values():
            total = sum_of(ours, few, model.vector(), 1, WEIGHTS)
            assert_close(total, sum(WEIGHTS[c] * row for c, row in enumerate(theirs)))


def test_the_order_of_clients_changes_nothing_and_is_kept() -> None:
    model = mlp()
    ours, orders = clients(model, records()), mixed(SAMPLED["noise on steps"])
    forwards = uploads_of(ours, paid(orders), model.vector(), 1)
    backwards = uploads_of(ours, paid(orders, (5, 3, 0, 2)), model.vector(), 1)
    assert list(forwards) == [0, 1, 2, 3, 4, 5]
    assert list(backwards) == [5, 3, 0, 2]
    for client, upload in backwards.items():
        assert_close(upload, forwards[client])


def test_rounds_and_seeds_differ() -> None:
    model, data, order = mlp(), records(), paid(SAMPLED["noise on steps"])
    uploads = [
        rows(uploads_of(clients(model, data, seed=seed), order, model.vector(), round))
        for seed in (0, 1) for round in (1, 2)
    ]  # fmt: skip
    assert len({float(one.sum()) for one in uploads}) == 4


# Together.


@pytest.mark.parametrize("name", ORDERS)
def test_a_sum_is_that_of_the_uploads(name: str) -> None:
    model = mlp()
    ours = clients(model, records())
    for order in (ORDERS[name], mixed(ORDERS[name]) | {5: ORDERS["clients clipped"]}):
        apart = uploads_of(ours, paid(order), model.vector(), 1)
        together = sum_of(ours, paid(order), model.vector(), 1, WEIGHTS)
        assert_close(together, sum(WEIGHTS[c] * upload for c, upload in apart.items()))


def test_who_uploaded_is_known_and_what_is_not() -> None:
    model = mlp()
    few = paid(ORDERS["plain"], (3, 1, 4))
    ours, theirs = clients(model, records()), ReferenceClients(model, records(), Streams(0))
    together = ours.perform(request(few, model.vector()))
    assert isinstance(together, Summed)
    assert together.clients == (3, 1, 4)
    apart = [one.perform(request(few, model.vector(), separate=True)) for one in (ours, theirs)]
    assert all(isinstance(one, Separate) and one.clients == (3, 1, 4) for one in apart)


def test_a_round_of_nobody_moves_nothing() -> None:
    model = mlp()
    for one in (clients(model, records()), ReferenceClients(model, records(), Streams(0))):
        for separate in (False, True):
            uploads = one.perform(request({}, model.vector(), separate=separate))
            assert uploads.clients == ()
            assert aggregate(model.vector(), uploads, {}).abs().sum() == 0


def silent() -> tuple[Model, tuple[Records, ...]]:
    """Return clients whose gradients are zero, so that only noise is uploaded."""
    data = tuple(Records(torch.zeros(size, 50, dtype=torch.float64), torch.zeros(size).long()) for size in SIZES)
    return Model(nn.Linear(50, 200, bias=False).double(), cross_entropy), data


@pytest.mark.parametrize(
    ("order", "size"),
    [
        (Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(3.0)), lambda n: 3.0),
        (
            Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(3.0), noise_on="step"),
            lambda n: 0.5 * 3.0 / n,
        ),
        (
            Order(
                steps=2, learning_rate=(0.5, 0.2), clip=RecordClip(1.0), noise=Gaussian(3.0), noise_on="step",
                batch=Poisson(0.5),
            ),
            lambda n: math.hypot(0.5, 0.2) * 3.0 / (0.5 * n),
        ),
        (
            Order(steps=2, learning_rate=(0.5, 0.2), clip=ClientClip(1.0), noise=Laplace(3.0), noise_on="step"),
            lambda n: math.hypot(0.5, 0.2) * 3.0 * math.sqrt(2),
        ),
    ],
    ids=["upload", "step", "two sampled steps", "two steps of a client"],
)  # fmt: skip
def test_the_noise_of_a_sum_is_as_large_as_that_of_the_uploads(order: Order, size: Callable[[int], float]) -> None:
    # 10,000 coordinates tell a standard deviation to 0.7 % (1.1 % for Laplace); 5 % is beyond chance.
    model, data = silent()
    seen = Records(public(50).x, public().y)
    ours = clients(model, data, seen)
    together = sum_of(ours, paid(order), model.vector(), 1, WEIGHTS)
    expected = math.sqrt(sum((WEIGHTS[c] * size(records)) ** 2 for c, records in enumerate(SIZES)))
    assert together.std().item() == pytest.approx(expected, rel=0.05)
    for client, upload in uploads_of(ours, paid(order), model.vector(), 1).items():
        assert upload.std().item() == pytest.approx(size(SIZES[client]), rel=0.05)


def test_the_noise_of_every_kind_of_order_is_in_the_sum() -> None:
    model, data = silent()
    ours = clients(model, data, Records(public(50).x, public().y))
    quiet = Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.01))
    for loud in (replace(quiet, noise=Gaussian(3.0), noise_on="step"), replace(quiet, steps=2, noise=Gaussian(3.0))):
        orders = dict.fromkeys(range(len(SIZES)), quiet) | {3: loud}
        together = sum_of(ours, paid(orders), model.vector(), 1, WEIGHTS)
        size = 3.0 if loud.noise_on == "upload" else 0.5 * 3.0 / SIZES[3]
        expected = math.hypot(WEIGHTS[3] * size, *(0.01 * WEIGHTS[c] for c in WEIGHTS if c != 3))
        assert together.std().item() == pytest.approx(expected, rel=0.05)


def test_a_sum_repeats_and_differs_from_round_to_round() -> None:
    model, order = mlp(), paid(mixed(SAMPLED["noise on steps"]))

    def total(round: int, seed: int = 0) -> Tensor:
        ours = clients(model, records(), seed=seed)
        first = sum_of(ours, order, model.vector(), round, WEIGHTS)
        assert torch.equal(sum_of(ours, order, model.vector(), round, WEIGHTS), first)  # it is a function of its names
        return first

    assert torch.equal(total(1), total(1))
    assert len({float(one.sum()) for one in (total(1), total(2), total(1, seed=1))}) == 3


def test_trainings_in_turn_are_what_each_is_alone_and_look_at_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of its own is gone when a GPU replays what it recorded with it."""
    model, order = mlp(), paid(mixed(SAMPLED["noise on steps"]))  # of unlike kinds, so that they cannot be one cohort
    alone = [clients(model, records(), seed=seed) for seed in (1, 2)]
    wanted = [torch.stack([sum_of(one, order, model.vector(), at, WEIGHTS) for one in alone]) for at in (1, 2)]
    made: list[int] = []

    def pool(data: tuple[Records, ...]) -> Pool:
        made.append(len(data))
        return Pool(data)

    monkeypatch.setattr(stacked, "Pool", pool)
    ours = clients(model, records())
    for at, totals in enumerate(wanted, start=1):
        asked = [request(order, model.vector(), at, WEIGHTS)] * 2
        assert_close(ours.repeat(asked, [Streams(1), Streams(2)]), totals)
    assert made == [len(SIZES)]


def test_a_sampled_sum_is_right_on_average() -> None:
    # One step is linear in who was sampled: the mean over many rounds is the step over all records.
    model, data = mlp(), records(sizes=(20, 20))
    model.load(torch.randn(model.dim, dtype=torch.float64))
    ours = clients(model, data)
    order = Order(steps=1, learning_rate=1.0, batch=Poisson(0.3), clip=RecordClip(0.5))
    few = {client: Charged(order, 20) for client in (0, 1)}
    weights = {0: 1.0, 1: 2.0}
    totals = torch.stack([sum_of(ours, few, model.vector(), round, weights) for round in range(300)])
    full = {client: Charged(replace(order, batch=ORDERS["plain"].batch), 20) for client in (0, 1)}
    expected = sum_of(ours, full, model.vector(), 1, {0: 1.0, 1: 2.0})
    spread = totals.std(dim=0) / math.sqrt(len(totals))
    assert ((totals.mean(dim=0) - expected).abs() <= 4.5 * spread + 1e-12).all()
    assert (spread > 0).any()


# Memory and threads.


@pytest.mark.parametrize(("chunk", "block"), [(1, 1), (1, 2**23), (600, 200), (2000, 1), (10**9, 10**9)])
def test_memory_changes_nothing(chunk: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = mlp(), records()
    orders = [paid(mixed(order)) for order in (ORDERS["everything"], SAMPLED["noise on steps"])]
    whole = [rows(uploads_of(clients(model, data), order, model.vector(), 1)) for order in orders]
    total = sum_of(clients(model, data), paid(ORDERS["records clipped"]), model.vector(), 1, WEIGHTS)
    monkeypatch.setattr(stacked, "_CPU_CHUNK", chunk)
    monkeypatch.setattr(stacked, "_CPU_BLOCK", block)
    for order, expected in zip(orders, whole, strict=True):
        assert_close(rows(uploads_of(clients(model, data), order, model.vector(), 1)), expected)
    again = sum_of(clients(model, data), paid(ORDERS["records clipped"]), model.vector(), 1, WEIGHTS)
    assert_close(again, total)


def test_a_process_that_was_given_a_share_of_a_gpu_cuts_chunks_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)

    def room() -> int:
        ours = clients(mlp(), records())
        ours.__dict__["_rng"] = torch.Generator()  # as it has on a GPU
        return ours._room

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    assert room() == 2**30
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.8 / 10)
    assert room() == pytest.approx(0.08 * 2**30, abs=1)
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")  # which older versions of torch do not have
    assert room() == 2**30


@pytest.mark.parametrize("chunk", [1, 600, 10**9])
def test_the_number_of_threads_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "_CPU_CHUNK", chunk)
    model, data = mlp(), records()
    order = paid(mixed(SAMPLED["noise on steps"]))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ours = clients(model, data)
        found.append([
            rows(uploads_of(ours, order, model.vector(), 1)),
            sum_of(ours, order, model.vector(), 1, WEIGHTS),
        ])  # fmt: skip
        assert torch.get_num_threads() == threads
    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1])


class Remembering(nn.Module):
    """Keeps what it saw last, for whoever wants to look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.layer(x)
        return self.seen


class Louder(nn.Module):
    """Is another model while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return (2 if self.training else 1) * self.layer(x)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_thread_trains_the_model_in_training(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "_CPU_CHUNK", 1)
    torch.set_num_threads(threads)
    model, data = Model(Louder().double(), cross_entropy), records()
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), paid(ORDERS["everything"]), model.vector(), 1)
    ours = clients(model, data)
    model.module.eval()
    assert_close(rows(uploads_of(ours, paid(ORDERS["everything"]), model.vector(), 1)), rows(theirs))


def test_a_module_that_keeps_what_it_saw_trains_on_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "_CPU_CHUNK", 1)
    torch.set_num_threads(2)
    model, data = Model(Remembering().double(), cross_entropy), records()
    ours = StackedClients(model, data, Streams(0), capabilities=capabilities_of(model, public()))
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), paid(ORDERS["everything"]), model.vector(), 1)
    assert_close(rows(uploads_of(ours, paid(ORDERS["everything"]), model.vector(), 1)), rows(theirs))


# Broken and unusual records.


@each("norm", [1, 2])
@each("steps", [1, 3])
@each("broken", [math.nan, math.inf])
@each("chunk", [1, 2**21])
def test_a_broken_record_counts_as_zero(
    norm: int, steps: int, broken: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked, "_CPU_CHUNK", chunk)
    model, data = mlp(), records()
    spoilt = list(data)
    x = data[2].x.clone()
    x[3, 1] = broken
    spoilt[2] = Records(x, data[2].y)
    order = paid(Order(steps=steps, learning_rate=0.5, clip=RecordClip(0.3, norm)))
    expected = rows(uploads_of(ReferenceClients(model, tuple(spoilt), Streams(0)), order, model.vector(), 1))
    assert torch.isfinite(expected).all()
    ours = clients(model, tuple(spoilt))
    assert_close(rows(uploads_of(ours, order, model.vector(), 1)), expected)
    together = sum_of(ours, order, model.vector(), 1, WEIGHTS)
    assert_close(together, sum(WEIGHTS[c] * row for c, row in enumerate(expected)))


@pytest.mark.parametrize("clip", [None, ClientClip(0.3), ModelClip(0.3)])
def test_a_broken_record_of_one_client_does_not_reach_the_others(clip: ClientClip | ModelClip | None) -> None:
    model, data = mlp(), records()
    spoilt = (*data[:2], Records(data[2].x.clone().fill_(math.nan), data[2].y), *data[3:])
    order = paid(Order(steps=2, learning_rate=0.5, clip=clip))
    theirs = uploads_of(ReferenceClients(model, spoilt, Streams(0)), order, model.vector(), 1)
    ours = uploads_of(clients(model, spoilt), order, model.vector(), 1)
    torch.testing.assert_close(rows(ours), rows(theirs), rtol=1e-9, atol=1e-11, equal_nan=True)
    assert torch.isfinite(ours[1]).all()


@each("norm", [1, 2])
@each("apart", [True, False])
@each(("other", "huge"), [(-21.5, 1.8e19), (-16.05, 1e25), (0.0, 1e11), (29.0, 1e11), (29.0, 1e18)])
def test_a_huge_input_is_clipped_whatever_its_derivative(norm: int, apart: bool, other: float, huge: float) -> None:
    # δ is as small as e^(other − 30) and its input as large as 1e25: squares of either cannot be held.
    model = Model(nn.Linear(2, 2, bias=False), cross_entropy)
    data = (Records(torch.tensor([[1.0, huge]]), torch.tensor([0])),)
    ours = clients(model, data, Records(torch.randn(8, 2), torch.arange(8) % 2))
    broadcast = torch.tensor([30.0, 0.0, other, 0.0])
    order = {0: Charged(Order(steps=1, learning_rate=1.0, clip=RecordClip(1e-4, norm)), 1)}
    upload = uploads_of(ours, order, broadcast)[0] if apart else sum_of(ours, order, broadcast, 1, {0: 1.0})
    reach = torch.linalg.vector_norm(upload.double(), ord=norm)
    assert reach <= 1e-4 * (1 + 1e-5)
    assert reach >= 0.9e-4 or huge == 1.8e19  # which is just small enough to be taken for longer than it is


def test_empty_batches_move_by_noise_alone() -> None:
    model, data = mlp(), records()
    quiet = Order(steps=2, learning_rate=0.5, batch=Poisson(1e-12), clip=RecordClip(0.3))
    ours = clients(model, data)
    assert rows(uploads_of(ours, paid(quiet), model.vector(), 1)).abs().max() <= 1e-15
    assert sum_of(ours, paid(quiet), model.vector(), 1, WEIGHTS).abs().max() <= 1e-15
    single = replace(quiet, steps=1)
    assert sum_of(ours, paid(single), model.vector(), 1, WEIGHTS).abs().sum() == 0
    loud = replace(quiet, noise=Gaussian(1.0), noise_on="step")
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), paid(loud), model.vector(), 1)
    assert_close(rows(uploads_of(ours, paid(loud), model.vector(), 1)), rows(theirs))


class Angle(nn.Module):
    """Sees only the direction of a record, and so divides by zero where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x / torch.linalg.vector_norm(x, dim=1, keepdim=True))


@pytest.mark.parametrize("clip", [None, RecordClip(0.3), ClientClip(0.1)])
def test_what_fills_gaps_counts_for_nothing_whatever_the_model_makes_of_it(
    clip: RecordClip | ClientClip | None,
) -> None:
    model, data = Model(Angle().double(), cross_entropy), records()
    order = paid(Order(steps=2, learning_rate=0.5, clip=clip))
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), order, model.vector(), 1)
    ours = StackedClients(
        model, data, Streams(0), capabilities=capabilities_of(model, public())
    )  # it may well be refused
    assert_close(rows(uploads_of(ours, order, model.vector(), 1)), rows(theirs))


@pytest.mark.parametrize("clip", [None, RecordClip(0.3), ClientClip(0.1)])
def test_words_of_clients_of_unlike_sizes(clip: RecordClip | ClientClip | None) -> None:
    module = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(20, CLASSES))
    model = Model(module.double(), cross_entropy)
    source = torch.Generator().manual_seed(1)
    data = tuple(Records(torch.randint(0, 9, (len(y), 5), generator=source), y) for y in (one.y for one in records()))
    seen = Records(torch.randint(0, 9, (8, 5), generator=source), public().y)
    order = paid(Order(steps=2, learning_rate=0.5, clip=clip))
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), order, model.vector(), 1)
    assert_close(rows(uploads_of(clients(model, data, seen), order, model.vector(), 1)), rows(theirs))


# Models.


def dropping() -> Model:
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, CLASSES))
    return Model(module.double(), cross_entropy)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_dropout_repeats_with_the_streams_and_leaves_torchs_own_alone(apart: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    order = paid(mixed(ORDERS["everything"]))
    model = dropping()
    parameters = model.vector()

    def upload(seed: int, round: int = 1) -> Tensor:
        ours = clients(model, records(), seed=seed)
        before = torch.get_rng_state()
        apart_or_not = uploads_of(ours, order, parameters, round) if apart else None
        result = sum_of(ours, order, parameters, round, WEIGHTS) if apart_or_not is None else rows(apart_or_not)
        assert torch.equal(torch.get_rng_state(), before)
        return result

    one = upload(0)
    torch.rand(3)  # whoever else draws from torch's generator is not heard
    assert torch.equal(one, upload(0))
    assert not torch.equal(one, upload(1))
    assert not torch.equal(one, upload(0, round=2))


def test_dropout_is_the_same_on_one_thread_and_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    # Random layers draw from one generator, so that threads would, now and then, take each other's numbers.
    def no_threads(*_: object, **__: object) -> None:
        raise AssertionError("random layers must stay on one thread")

    monkeypatch.setattr(stacked, "_CPU_CHUNK", 1)
    monkeypatch.setattr(stacked, "Cores", no_threads)
    model, data = dropping(), records()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(rows(uploads_of(clients(model, data), paid(ORDERS["several steps"]), model.vector(), 1)))
    assert_close(*found)


def test_dropout_drops_as_much_as_the_reference_client_on_average() -> None:
    model, data = dropping(), records(sizes=(6,))
    order = {0: Charged(Order(steps=1, learning_rate=1.0), 6)}
    parameters = model.vector()
    ours, theirs = clients(model, data), ReferenceClients(model, data, Streams(5))
    found, expected = (
        torch.stack([uploads_of(one, order, parameters, round)[0] for round in range(200)]) for one in (ours, theirs)
    )
    spread = torch.sqrt((found.var(dim=0) + expected.var(dim=0)) / 200)
    assert ((found.mean(dim=0) - expected.mean(dim=0)).abs() <= 4.5 * spread + 1e-12).all()
    assert (found.std(dim=0) > 0).any()


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(FEATURES)), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.scale * x)


@pytest.mark.parametrize("apart", [True, False])
def test_a_model_of_unknown_layers_trains_by_the_reference_clients_loop(apart: bool) -> None:
    model, data = Model(Unknown().double(), cross_entropy), records()
    found = capabilities_of(model, public())
    assert found.layers is None
    assert found.vectorised
    assert str(found) == "records' gradients at once"
    assert found.why_not == "Unknown is not among the layers that are known"
    order = paid(mixed(SAMPLED["noise on steps"]))
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), order, model.vector(), 1)
    ours = StackedClients(model, data, Streams(0), capabilities=found)
    assert ours.drawn_by == "client"
    uploads = ours.perform(request(order, model.vector(), separate=apart))
    assert isinstance(uploads, Separate)
    assert torch.equal(rows(uploads.by_client), rows(theirs))


def test_ways_are_told_in_words() -> None:
    assert str(capabilities_of(mlp(), public())) == "records' gradients from layers"
    assert str(Capabilities.none(mlp(), public())) == "records' gradients at once"
    assert str(Capabilities(None, False, False)) == "records' gradients one by one"
    regression = Model(nn.Linear(FEATURES, 1).double(), squared_error)
    seen = Records(public().x, public().x.sum(dim=1))
    assert capabilities_of(regression, seen).least_squares
    assert not Capabilities.none(regression, seen).least_squares
    assert not capabilities_of(mlp(), public()).least_squares


# Pooling before ReLU.


def pooled(relu: nn.Module, pool: nn.Module, flat: int, *, signal: bool) -> Model:
    convolution = nn.Conv1d(1, 2, 3, padding=1) if signal else nn.Conv2d(1, 2, 3, padding=1)
    module = nn.Sequential(convolution, relu, pool, nn.Flatten(), nn.Linear(flat, CLASSES))
    with torch.no_grad():  # whole numbers make many ties, and many of them at zero
        convolution.weight.copy_(torch.randint(-1, 2, convolution.weight.shape))
        convolution.bias.zero_()
    return Model(module.double(), cross_entropy)


@pytest.mark.parametrize(
    ("relu", "pool", "flat", "shape"),
    [
        (nn.ReLU(), nn.MaxPool2d(2), 18, (1, 6, 6)),
        (nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=1, padding=1), 72, (1, 6, 6)),
        (nn.ReLU(), nn.MaxPool2d(4, ceil_mode=True), 8, (1, 6, 6)),
        (nn.ReLU(), nn.MaxPool2d(2, dilation=2), 8, (1, 6, 6)),
        (nn.ReLU(), nn.MaxPool1d(2), 6, (1, 6)),
    ],
    ids=["plain", "overlapping", "ceiling", "dilated", "signals"],
)
def test_pooling_before_relu_is_the_same_where_numbers_tie(
    relu: nn.Module, pool: nn.Module, flat: int, shape: tuple[int, ...]
) -> None:
    model = pooled(relu, pool, flat, signal=len(shape) == 2)
    source = torch.Generator().manual_seed(1)
    data = tuple(
        Records(torch.randint(-1, 2, (len(one), *shape), generator=source).double(), one.y) for one in records()
    )
    convolved = model.module[0](data[0].x)  # type: ignore[index]
    assert (convolved == 0).any()
    assert len(convolved.unique()) < 16  # there are ties, indeed
    order = paid(Order(steps=1, learning_rate=0.5, clip=RecordClip(0.3)))
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), order, model.vector(), 1)
    assert_close(rows(uploads_of(clients(model, data, public(*shape)), order, model.vector(), 1)), rows(theirs))
    plain = paid(ORDERS["plain"])
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), plain, model.vector(), 1)
    assert_close(rows(uploads_of(clients(model, data, public(*shape)), plain, model.vector(), 1)), rows(theirs))


class OneBendForAll(nn.Module):
    """Uses one ReLU in two places, of which only one is followed by a pool."""

    def __init__(self) -> None:
        super().__init__()
        relu = nn.ReLU()
        self.first = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1, bias=False), relu, nn.MaxPool1d(2))
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(2 * (FEATURES // 2), 4), relu, nn.Linear(4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(self.second(self.first(x[:, None])), dim=1)


def test_a_relu_of_two_places_stays_where_it_is() -> None:
    model, data = Model(OneBendForAll().double(), cross_entropy), records()
    theirs = uploads_of(ReferenceClients(model, data, Streams(0)), paid(ORDERS["everything"]), model.vector(), 1)
    ours = uploads_of(clients(model, data), paid(ORDERS["everything"]), model.vector(), 1)
    assert_close(rows(ours), rows(theirs))
