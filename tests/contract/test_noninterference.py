"""No side doors: what a run writes, prints, asks and raises depends on the gate's answers alone; and the test that says so can see."""

import dataclasses
import logging
import math
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from contract import record_replay as sidedoor
from contract.record_replay import KINDS, SAME, file_leaks, leaks, run
from safetensors.torch import save_file
from support.fakes import planted_clip
from support.neighbour_files import CHANGES, READERS
from support.tiny_settings import (
    choose_spec,
    choose_tiny_settings,
    has_no_mechanism,
    is_local,
    make_records,
)

from privot.errors import PlanError
from privot.local import privatize
from privot.local.dataset import PrivatizedDataset
from privot.methods import MethodBase, list_methods, make_method
from privot.privacy import clipping as clipping_module
from privot.privacy import gate as gate_module
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed, Poisson, Shards
from privot.release.artifact import Artifact

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

# Honest miniatures, one for each verb and way to draw


def pixels(image, label):
    return image.flatten()


@dataclass(frozen=True)
class Means(MethodBase):
    """Noisy class means by `sum`: the frame of most leaks below."""

    noise_multiplier: float = 1.0
    name: ClassVar[str] = "miniature"
    steps: ClassVar[int] = 1

    def plan(self, spec):
        return Plan((Stage("means", "sum", self.noise_multiplier, self.steps),), Neighbours.REPLACE)

    def forecast(self, spec, plan):
        return {}

    def fit(self, gate, streams, progress):
        progress("asking", 0, 1)
        return self.product(gate, self.means(gate))

    def means(self, gate, query=pixels):
        return gate.sum("means", query, clip_norm=4.0, per_class=True)

    def product(self, gate, sums, extra=0.0):
        """``extra`` is where a leak goes in."""
        images = torch.sigmoid(sums.float().view(-1, *gate.spec.shape) + extra)
        return Artifact.from_images(images, torch.arange(gate.spec.num_classes))


class Descent(Means):
    """Several answers on Poisson draws, each query depending on the answers before it."""

    steps = 4

    def plan(self, spec):
        return Plan(
            (Stage("means", "sum", self.noise_multiplier, self.steps, Poisson(0.5)),),
            Neighbours.ADD_REMOVE,
        )

    def fit(self, gate, streams, progress):
        point = torch.rand(gate.spec.num_features, generator=streams.make_rng("start"))
        for step in range(self.steps):
            toward = gate.sum(
                "means", lambda image, label, point: image.flatten() - point, point, clip_norm=1.0
            )
            point = point + toward.float() / 10
            progress("walking", step + 1, self.steps, length=float(point.norm()))
        return self.product(gate, point.expand(gate.spec.num_classes, -1))


class Critic(Means):
    """A critic for each of five shards, that stays inside: it learns on a public schedule, and rows are routed to it."""

    steps = 100  # more than are kept, so that it stores and goes on
    shards: ClassVar[int] = 5

    def plan(self, spec):
        return Plan(
            (
                Stage(
                    "means",
                    "query_random_shards",
                    self.noise_multiplier,
                    self.steps,
                    Shards(self.shards),
                ),
            ),
            Neighbours.REPLACE,
        )

    def fit(self, gate, streams, progress):
        gate.split_into_shards(
            self.shards,
            {
                "net": torch.zeros(self.shards, gate.spec.num_features),
                "own": torch.arange(self.shards),
            },
        )
        point = torch.rand(10, gate.spec.num_features, generator=streams.make_rng("start"))
        for step in range(self.steps // len(point)):
            self.learn(gate, point, step)
            toward = self.ask(gate, point)
            point = point + toward.float() / 10
            gate.save_shard_states()
            progress("walking", step + 1, self.steps // len(point))
        return self.product(gate, point[: gate.spec.num_classes])

    def learn(self, gate, point, step):
        gate.update_shards(
            self.lesson,
            point,
            shard_indices=torch.tensor([step % self.shards, (step + 1) % self.shards]),
        )

    @staticmethod
    def lesson(images, labels, state, point):
        return {
            "net": state["net"] / 2 + images.flatten(1).mean(0) - point.mean(0),
            "own": state["own"],
        }

    def ask(self, gate, point):
        return gate.query_random_shards(
            "means", lambda state, row: state["net"] * (1 + row), point, clip_norm=1.0
        )


class Polled(Critic):
    """The sum over all critics."""

    def plan(self, spec):
        return Plan(
            (Stage("means", "sum_over_shards", self.noise_multiplier, self.steps),),
            Neighbours.REPLACE,
        )

    def ask(self, gate, point):
        return gate.sum_over_shards(
            "means", lambda state, point: state["net"] * (1 + point.mean(0)), point, clip_norm=1.0
        )


class Dealt(Critic):
    """A critic for each owner, who answers rows of its own, all of them or some in turn; all that it holds is the unit."""

    critics: ClassVar[int] = 1

    def plan(self, spec):
        if spec.num_clients is None:
            raise PlanError("owners must be declared")
        return Plan(
            (Stage("means", "query_clients", self.noise_multiplier, self.steps),), Neighbours.CLIENT
        )

    def fit(self, gate, streams, progress):
        count = gate.spec.num_clients * self.critics
        gate.split_into_shards(
            count,
            {"net": torch.zeros(count, gate.spec.num_features), "own": torch.arange(count)},
            self.most(gate),
        )
        point = torch.rand(10, gate.spec.num_features, generator=streams.make_rng("start"))
        for step in range(6):
            some = self.some(gate, step)
            self.learn(gate, point, step)
            said = gate.query_clients(
                "means",
                lambda state, row: state["net"] * (1 + row),
                point.expand(len(some), -1, -1),
                clip_norm=1.0,
                client_indices=some,
            )
            point = point + said.float().mean(0) / 10
            gate.save_shard_states()
            progress("walking", step + 1, 6)
        return self.product(gate, point[: gate.spec.num_classes])

    def learn(self, gate, point, step):
        gate.update_shards(self.lesson, point)

    def some(self, gate, step):
        return (
            torch.arange(step % 2, gate.spec.num_clients, 2)
            if step
            else torch.arange(gate.spec.num_clients)
        )

    def most(self, gate):
        return 12


class DealtByRecord(Dealt):
    """Two critics for each owner, one drawn for each row; a record is the unit."""

    critics = 2

    def plan(self, spec):
        (stage,) = super().plan(spec).stages
        return Plan((dataclasses.replace(stage, sampling=Shards(2)),), Neighbours.REPLACE)


class Chosen(Means):
    """One answer from records drawn without replacement; the size is declared."""

    def plan(self, spec):
        if spec.size is None:
            raise PlanError("the size must be declared")
        return Plan(
            (
                Stage(
                    "means",
                    "query_sample",
                    self.noise_multiplier,
                    1,
                    Fixed(spec.size // 3, spec.size),
                ),
            ),
            Neighbours.REPLACE,
        )

    def means(self, gate):
        value = gate.query_sample(
            "means", lambda records: records.images.mean(0), clip_norm=1.0, shape=gate.spec.shape
        )
        return value.view(1, -1).expand(gate.spec.num_classes, -1)


class Rows(Means):
    """One noisy row a record; the size is declared."""

    def plan(self, spec):
        return Plan((Stage("means", "rows", self.noise_multiplier),), Neighbours.REPLACE)

    def means(self, gate):
        rows = gate.rows("means", pixels, clip_norm=4.0)
        return rows[: gate.spec.num_classes]


class Sorted(Means):
    """Block means of sorted projections; the class sizes are declared."""

    def plan(self, spec):
        return Plan((Stage("means", "sorted_blocks", self.noise_multiplier),), Neighbours.REPLACE)

    def means(self, gate):
        frame = torch.eye(gate.spec.num_features)[:8]
        blocks = gate.sorted_blocks("means", pixels, frame=frame, num_blocks=5, clip_norm=4.0)
        return blocks.mean((1, 2), keepdim=True).expand(-1, gate.spec.num_features, 1)


HONEST = (Means, Descent, Critic, Polled, Dealt, DealtByRecord, Chosen, Rows, Sorted)


# Planted leaks


class CountInSteps(Means):
    """The number of records sets the number of steps."""

    def fit(self, gate, streams, progress):
        for step in range(gate._dataset._count_records()):
            progress("training", step, 0)
        return self.product(gate, self.means(gate))


class CountInSettings(Means):
    """... or goes into the manifest among harmless arguments."""

    def fit(self, gate, streams, progress):
        made = self.product(gate, self.means(gate))
        return Artifact(made.kind, made.tensors, "", {"records": gate._dataset._count_records()})


class CoarseCount(Means):
    """Epochs of so many steps: a coarse count is one too."""

    def fit(self, gate, streams, progress):
        return self.product(gate, self.means(gate), gate._dataset._count_records() // 30)


class ClosurePeek(Means):
    """The query hands a statistic out through its closure."""

    def plan(self, spec):
        return Plan((Stage("means", "query_sample", self.noise_multiplier),), Neighbours.REPLACE)

    def fit(self, gate, streams, progress):
        held = []

        def query(records):
            held.append(records.images.mean())
            return records.images.mean(0)

        value = gate.query_sample("means", query, clip_norm=1.0, shape=gate.spec.shape)
        return self.product(gate, value.view(1, -1).expand(gate.spec.num_classes, -1), held[0])


class UpdatePeek(Critic):
    """The same through the way that releases nothing."""

    def fit(self, gate, streams, progress):
        held = []

        def lesson(images, labels, state):
            held.append(torch._C._functorch.get_unwrapped(images).std())
            return state

        gate.split_into_shards(self.shards, {"net": torch.zeros(self.shards, 1)})
        gate.update_shards(lesson)
        return self.product(
            gate, torch.zeros(gate.spec.num_classes, gate.spec.num_features), held[0]
        )


class UnwrappedPeek(Means):
    """A query on one record alone opens the batch beneath it."""

    def fit(self, gate, streams, progress):
        held = []

        def query(image, label):
            held.append(torch._C._functorch.get_unwrapped(image).mean())
            return image.flatten()

        return self.product(gate, self.means(gate, query), held[-1])


class PortionCount(Means):
    """The query counts how often it is called: once for each portion of records."""

    def fit(self, gate, streams, progress):
        calls = []

        def query(image, label):
            calls.append(1)
            return image.flatten()

        sums = self.means(gate, query)
        return self.product(gate, sums, len(calls) / 1000)

    def means(self, gate, query=pixels):
        object.__setattr__(gate, "_chunk_size", 1)  # as with portions of one record
        return super().means(gate, query)


class EarlyStop(Means):
    """Training stops when a private loss is small enough."""

    steps = 5

    def fit(self, gate, streams, progress):
        level = float(gate._dataset._read_records(slice(None)).images.mean())
        sums = self.means(gate)
        for step in range(1, self.steps):
            if level > 0.1 * step + 0.15:
                sums = sums + self.means(gate)
        return self.product(gate, sums * 0)


class UnequalAsks(Means):
    """The second answer is asked for only when there is a record of class 2."""

    steps = 2

    def fit(self, gate, streams, progress):
        self.means(gate)
        if (gate._dataset._labels == 2).any():
            self.means(gate)
        return self.product(gate, torch.zeros(gate.spec.num_classes, gate.spec.num_features))


class RaggedShape(Means):
    """The answer is as long as there are records."""

    def plan(self, spec):
        return Plan((Stage("means", "query_sample", self.noise_multiplier),), Neighbours.REPLACE)

    def fit(self, gate, streams, progress):
        shape = (gate._dataset._count_records(),)
        gate.query_sample(
            "means", lambda records: records.images.flatten(1).mean(1), clip_norm=1.0, shape=shape
        )
        return self.product(gate, torch.zeros(gate.spec.num_classes, gate.spec.num_features))


class DataInError(Means):
    """An exception's text carries data."""

    def fit(self, gate, streams, progress):
        raise ValueError(
            f"cannot train at mean {gate._dataset._read_records(slice(None)).images.mean():.6f}"
        )


class FailingQuery(Means):
    """A query fails on some records and not on others: that it fails is a bit."""

    def plan(self, spec):
        return Plan((Stage("means", "query_sample", self.noise_multiplier),), Neighbours.REPLACE)

    def fit(self, gate, streams, progress):
        def query(records):
            if records.images.mean() > 0.4:
                raise ValueError("no convergence")
            return records.images.mean(0)

        gate.query_sample("means", query, clip_norm=1.0, shape=gate.spec.shape)
        return self.product(gate, torch.zeros(gate.spec.num_classes, gate.spec.num_features))


class LossInProgress(Means):
    """The progress bar shows a private loss."""

    def fit(self, gate, streams, progress):
        progress(
            "training",
            1,
            1,
            loss=float(gate._dataset._read_records(slice(None)).images.square().mean()),
        )
        return self.product(gate, self.means(gate))


class Printing(Means):
    def fit(self, gate, streams, progress):
        print("mean", float(gate._dataset._read_records(slice(None)).images.mean()))
        return self.product(gate, self.means(gate))


class RawWrite(Means):
    """Past Python's streams, to the descriptor."""

    def fit(self, gate, streams, progress):
        os.write(2, b"%d" % gate._dataset._count_records())
        print(gate._dataset._count_records(), file=sys.__stderr__)
        return self.product(gate, self.means(gate))


class Logging(Means):
    def fit(self, gate, streams, progress):
        logging.getLogger("miniature").debug("count %d", gate._dataset._count_records())
        return self.product(gate, self.means(gate))


class Warning(Means):
    def fit(self, gate, streams, progress):
        if gate._dataset._read_records(slice(None)).images.std() < 0.01:
            warnings.warn("the data are constant", stacklevel=1)
        return self.product(gate, self.means(gate))


class LabelHistogram(Means):
    """The product has as many images of a class as the data have records."""

    def fit(self, gate, streams, progress):
        self.means(gate)
        labels = gate._dataset._read_records(slice(None)).labels
        return Artifact.from_images(
            torch.zeros(len(labels), *gate.spec.shape), labels.sort().values
        )


class WritingAFile(Means):
    """A checkpoint in the working folder."""

    def fit(self, gate, streams, progress):
        Path("critic.txt").write_text(str(gate._dataset._read_records(slice(None)).images.mean()))
        return self.product(gate, self.means(gate))


class WritingElsewhere(Means):
    """A cache far from the run: its content is not even looked at, the writing is enough."""

    def fit(self, gate, streams, progress):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(str(gate._dataset._read_records(slice(None)).images.mean()))
        return self.product(gate, self.means(gate))


class StateOutside(Critic):
    """What a shard has learned is used outside of the gate."""

    def ask(self, gate, point):
        return super().ask(gate, point) + gate._shards[1]["net"].mean()


class VaultOutside(Critic):
    """What was stored of it is read from the disk."""

    def ask(self, gate, point):
        gate.save_shard_states()
        return super().ask(gate, point) + sum(gate._checkpoint_path().read_bytes()) % 97


class StoredInTheOpen(Critic):
    """The states are kept beside the public parts of the run."""

    def ask(self, gate, point):
        save_file({"net": gate._shards[1]["net"].clone()}, gate._folder / "critic.safetensors")
        return super().ask(gate, point)


class AcrossShards(Critic):
    """A lesson remembers the shard before, so that one record has a part in two states: nothing shows but where the rows move."""

    def learn(self, gate, point, step):
        held = []

        def lesson(images, labels, state):
            held.append(torch._C._functorch.get_unwrapped(images).mean())
            return {"net": state["net"] + images.mean() + sum(held), "own": state["own"]}

        gate._chunk_size = 1  # a shard at a time
        gate.update_shards(lesson)


class MixedStates(Critic):
    """The states themselves are mixed, as by an average of all critics."""

    def learn(self, gate, point, step):
        super().learn(gate, point, step)
        gate._shards[1]["net"][:] = gate._shards[1]["net"].mean(0)


class LoudCritic(Critic):
    """A critic's own answer is let out of its ball."""

    def ask(self, gate, point):
        def loud(state, row):
            return state["net"] * 1e3

        with mock.patch.object(clipping_module, "clip_rows", planted_clip()):
            return gate.query_random_shards("means", loud, point, clip_norm=1.0)


class LongestOwner(Dealt):
    """Shards are as long as the largest owner's records: the others are repeated by its number of them."""

    def most(self, gate):
        return int((owners_of(gate) == 0).sum()) + 3


def owners_of(gate):
    """Whose each record is, by the gate's own order."""
    return gate._dataset._assign_clients(gate._get_secret_order().numpy())


class AcrossOwners(Dealt):
    """An average of all owners' critics, as a server might like to send out."""

    def learn(self, gate, point, step):
        super().learn(gate, point, step)
        gate._shards[1]["net"][:] = gate._shards[1]["net"].mean(0)


class LargeOwnersAlone(Dealt):
    """Only owners with many records are asked."""

    def some(self, gate, step):
        many = torch.bincount(torch.from_numpy(owners_of(gate)))
        return (many > 9).nonzero().flatten()


class ScheduleFromDraws(Critic):
    """Only critics that were drawn learn, as in the literature: then a state remembers the draws. The schedule itself shows it."""

    def learn(self, gate, point, step):
        gate.update_shards(
            self.lesson, point, shard_indices=drawn[-1] if (drawn := self.drawn) else None
        )

    def ask(self, gate, point):
        def query(state, row):
            self.drawn.append(torch._C._functorch.get_unwrapped(state["own"]).unique())
            return state["net"] * (1 + row)

        return gate.query_random_shards("means", query, point, clip_norm=1.0)

    def fit(self, gate, streams, progress):
        object.__setattr__(self, "drawn", [])
        return super().fit(gate, streams, progress)


class DataDirectly(Means):
    """The first record itself."""

    def fit(self, gate, streams, progress):
        return self.product(gate, self.means(gate), gate._dataset._read_records(slice(0, 1)).images)


class NormalisedOutside(Means):
    """A normalisation constant of the whole data set in the public arguments of a query."""

    def fit(self, gate, streams, progress):
        scale = gate._dataset._read_records(slice(None)).images.max()
        return self.product(
            gate,
            gate.sum(
                "means", lambda image, label, scale: image.flatten() / scale, scale, clip_norm=4.0
            ),
            scale,
        )


class BoundFromData(Means):
    """The bound, and with it the noise, follows the data's own norm."""

    def fit(self, gate, streams, progress):
        bound = float(gate._dataset._read_records(slice(None)).images.flatten(1).norm(dim=1).max())
        gate.sum("means", pixels, clip_norm=bound)
        return self.product(gate, torch.zeros(gate.spec.num_classes, gate.spec.num_features))


class SeedFromData(Means):
    """The public stream is seeded by the data."""

    def fit(self, gate, streams, progress):
        seed = int(gate._dataset._read_records(slice(None)).images.double().sum() * 1e6)
        noise = torch.randn(gate.spec.num_features, generator=torch.Generator().manual_seed(seed))
        return self.product(gate, self.means(gate), noise.view(gate.spec.shape))


class SecretOutside(Means):
    """The secret stream drives the public half: it could then not be replayed, and would show the noise's generator."""

    def fit(self, gate, streams, progress):
        return self.product(gate, self.means(gate), gate._rng.normal(gate.spec.shape).float())


class Environment(Means):
    def fit(self, gate, streams, progress):
        if gate._dataset._read_records(slice(None)).images.mean() > 0.4:
            os.environ["MINIATURE_BRIGHT"] = "1"
        return self.product(gate, self.means(gate))


class MendedRecords(Means):
    """How many records had to be mended (they are black)."""

    def fit(self, gate, streams, progress):
        black = (gate._dataset._read_records(slice(None)).images.flatten(1).amax(1) == 0).sum()
        return self.product(gate, self.means(gate), black)


class OrderLeak(Means):
    """A statistic that only the order of the records can move."""

    def fit(self, gate, streams, progress):
        images = gate._dataset._read_records(slice(None)).images.flatten(1)
        return self.product(gate, self.means(gate), (images[1:] - images[:-1]).norm())


class CrossRecord(Means):
    """A query knows of the other records, so that one of them moves the parts of all: nothing shows but the distance."""

    def plan(self, spec):
        return Plan((Stage("means", "sum", self.noise_multiplier),), Neighbours.ADD_REMOVE)

    def fit(self, gate, streams, progress):
        sign = 1 if gate._dataset._count_records() % 2 else -1
        gate.sum("means", lambda image, label: sign * image.flatten(), clip_norm=4.0)
        return self.product(gate, torch.zeros(gate.spec.num_classes, gate.spec.num_features))


PLANTED = [
    kind
    for kind in globals().values()
    if isinstance(kind, type) and issubclass(kind, Means) and kind not in HONEST
]


def declaring(kind):
    """A method whose declaration will do for this one."""
    return Dealt() if issubclass(kind, Dealt) else Means()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """One folder for all runs of a test, so that no path tells them apart; the data set has no ledger of its own from another test."""
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    return tmp_path / "run"


@pytest.mark.parametrize("name", sorted(list_methods()))
def test_methods_have_no_side_doors(name, root, trust):
    method = make_method(name, choose_tiny_settings(name))
    if not method.plan(choose_spec(method)).stages and not is_local(method):
        pytest.skip(
            "no mechanism: the release carries NoGuarantee, and depends on the data by design"
        )
    assert list(leaks(method, make_records(), choose_spec(method), root)) == []
    trust(
        "G3",
        "pairs of data sets that nothing told apart, 12 kinds a method",
        len(KINDS),
        of=len(KINDS),
    )


WITH_A_MECHANISM = [
    name
    for name in sorted(list_methods())
    if not has_no_mechanism(make_method(name, choose_tiny_settings(name)))
]


@pytest.mark.parametrize(
    ("name", "reader"), [(name, READERS[place % 4]) for place, name in enumerate(WITH_A_MECHANISM)]
)
def test_methods_have_no_side_doors_on_files(name, reader, root, trust):
    """Each method through one of the readers; all of the gate's verbs go through each of them in test_file_neighbours."""
    method = make_method(name, choose_tiny_settings(name))
    assert list(file_leaks(method, make_records(), choose_spec(method), root, reader)) == []
    trust("G3", "methods run on neighbouring files that nothing told apart", 1, of=1)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", WITH_A_MECHANISM)
def test_methods_have_no_side_doors_through_any_reader(name, reader, root):
    method = make_method(name, choose_tiny_settings(name))
    assert list(file_leaks(method, make_records(), choose_spec(method), root, reader)) == []


@pytest.mark.parametrize("name", ["gs-wgan"])
@pytest.mark.parametrize("reader", READERS)
def test_methods_whose_shards_follow_the_files_are_caught(name, reader, root, monkeypatch, trust):
    """The shard of a record is its place in the files: one file that changes its class moves others to other shards."""
    monkeypatch.setattr(
        Gate, "_get_secret_order", lambda gate: torch.arange(gate._dataset._count_records())
    )
    monkeypatch.setattr(
        sidedoor,
        "coupled_orders",
        lambda one, other: (np.arange(one._count_records()), np.arange(other._count_records())),
    )
    method = make_method(name, choose_tiny_settings(name))
    changes = {kind: CHANGES[kind] for kind in ("one renamed", "one replaced")}
    found = [
        what
        for _, what in file_leaks(
            method, make_records(), choose_spec(method), root, reader, changes
        )
    ]
    assert any("moves" in str(each) for each in found)
    trust("G3", "planted positions caught, a reader each", 1, of=1)


def test_owners_in_turn_with_several_critics_have_no_side_doors(root):
    method = make_method(
        "federated-gs-wgan",
        {
            **choose_tiny_settings("federated-gs-wgan"),
            "unit": "record",
            "num_critics": 2,
            "clients_per_round": 2,
        },
    )
    assert (
        list(
            leaks(
                method,
                make_records(),
                choose_spec(method),
                root,
                ["one replaced", "one NaN", "one removed", "all replaced"],
            )
        )
        == []
    )


@pytest.mark.parametrize("kind", HONEST, ids=lambda kind: kind.__name__)
def test_honest_miniatures_pass(kind, root):
    assert list(leaks(kind(), make_records(), choose_spec(kind()), root)) == []


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_planted_leaks_are_caught(kind, root, trust):
    # The owner declares nothing but shape and classes, and how many owners there are if need be: then even the size is a secret.
    spec = choose_spec(declaring(kind))
    assert next(leaks(kind(), make_records(), spec, root), None) is not None
    trust("G3", "planted leaks caught", 1, of=1)


@pytest.mark.parametrize(
    "kind",
    [each for each in PLANTED if each not in (SecretOutside, WritingElsewhere, ScheduleFromDraws)],
    ids=lambda kind: kind.__name__,
)
def test_leaks_are_caught_by_the_data_alone(kind, root):
    # On D itself there is nothing to see, so what was caught above was not some accident of running twice.
    assert list(leaks(kind(), make_records(), choose_spec(declaring(kind)), root, [SAME])) == []


def test_what_a_client_sends_beside_its_channel_is_seen(root, monkeypatch):
    """A file that tells how bright the first record is, in a fact that no channel made."""
    method = make_method("entropic-gan", choose_tiny_settings("entropic-gan"))
    save = PrivatizedDataset.save
    bright = []
    monkeypatch.setattr(
        privatize,
        "Gate",
        lambda data, *given, **more: bright.append(data) or gate_module.Gate(data, *given, **more),
    )

    def telling(sent, out):
        save(sent, out)
        Path(out).with_suffix(".log").write_text(
            str(bright[-1]._read_records(slice(0, 1)).images.mean())
        )

    monkeypatch.setattr(PrivatizedDataset, "save", telling)
    assert next(leaks(method, make_records(), choose_spec(method), root), None) is not None


def test_the_list_is_long_enough():
    assert len(KINDS) == 12
    assert len(PLANTED) >= 14


@pytest.mark.parametrize("kind", HONEST, ids=lambda kind: kind.__name__)
def test_an_honest_run_makes_a_release(kind, root):
    # A miniature that failed on both sides alike would pass for honest.
    trace = run(kind(), *make_records(), choose_spec(kind()), root)
    assert [each for each in trace.seen if each[0] == "error"] == []
    assert trace.release
    assert all(math.isfinite(float(value.abs().max())) for value in trace.results)
