"""Honest miniatures of methods, one for each operation of the gate, and leaks planted into them."""

import dataclasses
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import torch
from safetensors.torch import save_file
from support.fakes import planted_clip
from torch._C._functorch import get_unwrapped

from privot.errors import PlanError
from privot.methods import MethodBase
from privot.privacy import clipping
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed, Poisson, Shards
from privot.release.artifact import Artifact


def flatten_image(image, label):
    return image.flatten()


@dataclass(frozen=True)
class Means(MethodBase):
    """Noisy class means by `sum`: the frame of most leaks."""

    noise_multiplier: float = 1.0
    name: ClassVar[str] = "miniature"
    operation: ClassVar[str] = "sum"
    neighbours: ClassVar[Neighbours] = Neighbours.REPLACE
    sampling: ClassVar[object] = None
    steps: ClassVar[int] = 1

    def plan(self, spec):
        sampling = [self.sampling] if self.sampling else []
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        stage = Stage("means", self.operation, noise_multiplier, self.steps, *sampling)
        return Plan((stage,), self.neighbours)

    def forecast(self, spec, plan):
        return {}

    def fit(self, gate, streams, progress):
        progress("querying", 0, 1)
        return self.release(gate, self.query_means(gate))

    def query_means(self, gate, query=flatten_image):
        return gate.sum("means", query, clip_norm=4.0, per_class=True)

    def release(self, gate, sums, leaked=0.0):
        images = torch.sigmoid(sums.float().view(-1, *gate.spec.shape) + leaked)
        return Artifact.from_images(images, torch.arange(gate.spec.num_classes))

    def release_nothing(self, gate, leaked=0.0):
        return self.release(
            gate, torch.zeros(gate.spec.num_classes, gate.spec.num_features), leaked
        )


class Descent(Means):
    """Several results on Poisson samples, each query depending on the results before it."""

    steps = 4
    neighbours = Neighbours.ADD_REMOVE
    sampling = Poisson(0.5)

    def fit(self, gate, streams, progress):
        point = torch.rand(gate.spec.num_features, generator=streams.make_rng("start"))
        for step in range(self.steps):
            gradient = gate.sum(
                "means", lambda image, label, point: image.flatten() - point, point, clip_norm=1.0
            )
            point = point + gradient.float() / 10
            progress("descending", step + 1, self.steps, length=float(point.norm()))
        return self.release(gate, point.expand(gate.spec.num_classes, -1))


class Critic(Means):
    """A critic for each of five shards learns on a public schedule; rows go to random critics."""

    operation = "query_random_shards"
    steps = 100  # more than are stored, so that checkpoints are saved
    num_shards: ClassVar[int] = 5
    sampling = Shards(5)

    def fit(self, gate, streams, progress):
        num_shards = self.count_shards(gate)
        state = {
            "net": torch.zeros(num_shards, gate.spec.num_features),
            "own": torch.arange(num_shards),
        }
        gate.split_into_shards(num_shards, state, *self.limit_records(gate))
        point = torch.rand(10, gate.spec.num_features, generator=streams.make_rng("start"))
        for step in range(self.count_rounds()):
            self.update(gate, point, step)
            point = point + self.query_critics(gate, point, step).float() / 10
            gate.save_shard_states()
            progress("training", step + 1, self.count_rounds())
        return self.release(gate, point[: gate.spec.num_classes])

    def count_shards(self, gate):
        return self.num_shards

    def count_rounds(self):
        return self.steps // 10

    def limit_records(self, gate):
        return ()

    def update(self, gate, point, step):
        indices = torch.tensor([step % self.num_shards, (step + 1) % self.num_shards])
        gate.update_shards(self.train_critic, point, shard_indices=indices)

    @staticmethod
    def train_critic(images, labels, state, point):
        net = state["net"] / 2 + images.flatten(1).mean(0) - point.mean(0)
        return {"net": net, "own": state["own"]}

    def query_critics(self, gate, point, step):
        return gate.query_random_shards(
            "means", lambda state, row: state["net"] * (1 + row), point, clip_norm=1.0
        )


class SummedCritics(Critic):
    """The sum over all critics."""

    operation = "sum_over_shards"
    sampling = None

    def query_critics(self, gate, point, step):
        return gate.sum_over_shards(
            "means", lambda state, point: state["net"] * (1 + point.mean(0)), point, clip_norm=1.0
        )


class ClientCritics(Critic):
    """A critic for each client, who answers rows of its own; all that it holds is the unit."""

    operation = "query_clients"
    neighbours = Neighbours.CLIENT
    sampling = None
    critics_per_client: ClassVar[int] = 1

    def plan(self, spec):
        if spec.num_clients is None:
            raise PlanError("clients must be declared")
        return super().plan(spec)

    def count_shards(self, gate):
        return gate.spec.num_clients * self.critics_per_client

    def count_rounds(self):
        return 6

    def limit_records(self, gate):
        return (12,)

    def update(self, gate, point, step):
        gate.update_shards(self.train_critic, point)

    def choose_clients(self, gate, step):
        return torch.arange(step % 2 if step else 0, gate.spec.num_clients, 2 if step else 1)

    def query_critics(self, gate, point, step):
        clients = self.choose_clients(gate, step)
        return gate.query_clients(
            "means",
            lambda state, row: state["net"] * (1 + row),
            point.expand(len(clients), -1, -1),
            clip_norm=1.0,
            client_indices=clients,
        ).mean(0)


class ClientCriticsByRecord(ClientCritics):
    """Two critics for each client, one drawn for each row; a record is the unit."""

    critics_per_client = 2
    neighbours = Neighbours.REPLACE
    sampling = Shards(2)


class SampleMean(Means):
    """One result from records drawn without replacement; the size is declared."""

    operation = "query_sample"

    def plan(self, spec):
        if spec.size is None:
            raise PlanError("the size must be declared")
        (stage,) = super().plan(spec).stages
        sampling = Fixed(spec.size // 3, spec.size)
        return Plan((dataclasses.replace(stage, sampling=sampling),), self.neighbours)

    def query_means(self, gate):
        mean = gate.query_sample(
            "means", lambda records: records.images.mean(0), clip_norm=1.0, shape=gate.spec.shape
        )
        return mean.view(1, -1).expand(gate.spec.num_classes, -1)


class Rows(Means):
    """One noisy row a record; the size is declared."""

    operation = "rows"

    def query_means(self, gate):
        return gate.rows("means", flatten_image, clip_norm=4.0)[: gate.spec.num_classes]


class SortedBlocks(Means):
    """Block means of sorted projections; the class sizes are declared."""

    operation = "sorted_blocks"

    def query_means(self, gate):
        frame = torch.eye(gate.spec.num_features)[:8]
        blocks = gate.sorted_blocks(
            "means", flatten_image, frame=frame, num_blocks=5, clip_norm=4.0
        )
        return blocks.mean((1, 2), keepdim=True).expand(-1, gate.spec.num_features, 1)


HONEST = (
    Means,
    Descent,
    Critic,
    SummedCritics,
    ClientCritics,
    ClientCriticsByRecord,
    SampleMean,
    Rows,
    SortedBlocks,
)

# Planted leaks

LEAKS: dict[str, type[Means]] = {}


def register(leaking_class):
    LEAKS[leaking_class.__name__] = leaking_class
    return leaking_class


def plant(function=None, *, base=Means, **facts):
    """Register a method that leaks in this ``fit(self, gate, streams, progress)``."""
    if function is None:
        return lambda function: plant(function, base=base, **facts)
    return register(type(function.__name__, (base,), {"fit": function, **facts}))


def read_images(gate):
    return gate._dataset._read_records(slice(None)).images


def count_records(gate):
    return gate._dataset._count_records()


@plant
def count_in_steps(self, gate, streams, progress):
    for step in range(count_records(gate)):
        progress("training", step, 0)
    return self.release(gate, self.query_means(gate))


@plant
def count_in_manifest(self, gate, streams, progress):
    artifact = self.release(gate, self.query_means(gate))
    return Artifact(artifact.kind, artifact.tensors, "", {"records": count_records(gate)})


@plant
def coarse_count(self, gate, streams, progress):
    return self.release(gate, self.query_means(gate), count_records(gate) // 30)


@plant
def first_record(self, gate, streams, progress):
    return self.release(gate, self.query_means(gate), read_images(gate)[:1])


@plant
def number_of_black_images(self, gate, streams, progress):
    black = (read_images(gate).flatten(1).amax(1) == 0).sum()
    return self.release(gate, self.query_means(gate), black)


@plant
def order_of_records(self, gate, streams, progress):
    images = read_images(gate).flatten(1)
    return self.release(gate, self.query_means(gate), (images[1:] - images[:-1]).norm())


@plant
def label_histogram(self, gate, streams, progress):
    self.query_means(gate)
    labels = gate._dataset._read_records(slice(None)).labels
    return Artifact.from_images(torch.zeros(len(labels), *gate.spec.shape), labels.sort().values)


@plant(operation="query_sample")
def query_result_in_closure(self, gate, streams, progress):
    held = []

    def query(records):
        held.append(records.images.mean())
        return records.images.mean(0)

    mean = gate.query_sample("means", query, clip_norm=1.0, shape=gate.spec.shape)
    return self.release(gate, mean.view(1, -1).expand(gate.spec.num_classes, -1), held[0])


@plant(base=Critic)
def shard_update_in_closure(self, gate, streams, progress):
    held = []

    def train_critic(images, labels, state):
        held.append(get_unwrapped(images).std())
        return state

    gate.split_into_shards(self.num_shards, {"net": torch.zeros(self.num_shards, 1)})
    gate.update_shards(train_critic)
    return self.release_nothing(gate, held[0])


@plant
def batch_beneath_a_record(self, gate, streams, progress):
    held = []

    def query(image, label):
        held.append(get_unwrapped(image).mean())
        return image.flatten()

    return self.release(gate, self.query_means(gate, query), held[-1])


@plant
def number_of_chunks(self, gate, streams, progress):
    calls = []

    def query(image, label):
        calls.append(1)
        return image.flatten()

    gate._chunk_size = 1
    sums = self.query_means(gate, query)
    return self.release(gate, sums, len(calls) / 1000)


@plant(steps=5)
def early_stop(self, gate, streams, progress):
    level = float(read_images(gate).mean())
    self.query_means(gate)
    for step in range(1, self.steps):
        if level > 0.1 * step + 0.15:
            self.query_means(gate)
    return self.release_nothing(gate)


@plant(steps=2)
def query_that_depends_on_a_class(self, gate, streams, progress):
    self.query_means(gate)
    if (gate._dataset._labels == 2).any():
        self.query_means(gate)
    return self.release_nothing(gate)


@plant(operation="query_sample")
def result_as_long_as_the_data(self, gate, streams, progress):
    gate.query_sample(
        "means",
        lambda records: records.images.flatten(1).mean(1),
        clip_norm=1.0,
        shape=(count_records(gate),),
    )
    return self.release_nothing(gate)


@plant
def text_of_an_exception(self, gate, streams, progress):
    raise ValueError(f"cannot train at mean {read_images(gate).mean():.6f}")


@plant(operation="query_sample")
def query_that_fails_on_some_records(self, gate, streams, progress):
    def query(records):
        if records.images.mean() > 0.4:
            raise ValueError("no convergence")
        return records.images.mean(0)

    gate.query_sample("means", query, clip_norm=1.0, shape=gate.spec.shape)
    return self.release_nothing(gate)


@plant
def loss_in_progress(self, gate, streams, progress):
    progress("training", 1, 1, loss=float(read_images(gate).square().mean()))
    return self.release(gate, self.query_means(gate))


@plant
def printed_mean(self, gate, streams, progress):
    print("mean", float(read_images(gate).mean()))
    return self.release(gate, self.query_means(gate))


@plant
def written_to_a_descriptor(self, gate, streams, progress):
    os.write(2, b"%d" % count_records(gate))
    print(count_records(gate), file=sys.__stderr__)
    return self.release(gate, self.query_means(gate))


@plant
def logged_count(self, gate, streams, progress):
    logging.getLogger("miniature").debug("count %d", count_records(gate))
    return self.release(gate, self.query_means(gate))


@plant
def warned_of_constant_data(self, gate, streams, progress):
    if read_images(gate).std() < 0.01:
        warnings.warn("the data are constant", stacklevel=1)
    return self.release(gate, self.query_means(gate))


@plant
def file_in_the_working_folder(self, gate, streams, progress):
    Path("critic.txt").write_text(str(read_images(gate).mean()))
    return self.release(gate, self.query_means(gate))


@plant
def file_elsewhere(self, gate, streams, progress):
    """The content of files elsewhere is not compared: to write one is enough to be caught."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(str(read_images(gate).mean()))
    return self.release(gate, self.query_means(gate))


@plant
def environment_variable(self, gate, streams, progress):
    if read_images(gate).mean() > 0.4:
        os.environ["MINIATURE_BRIGHT"] = "1"
    return self.release(gate, self.query_means(gate))


@plant
def scale_in_public_arguments(self, gate, streams, progress):
    scale = read_images(gate).max()
    sums = gate.sum(
        "means", lambda image, label, scale: image.flatten() / scale, scale, clip_norm=4.0
    )
    return self.release(gate, sums, scale)


@plant
def clip_norm_from_the_data(self, gate, streams, progress):
    clip_norm = float(read_images(gate).flatten(1).norm(dim=1).max())
    gate.sum("means", flatten_image, clip_norm=clip_norm)
    return self.release_nothing(gate)


@plant
def seed_from_the_data(self, gate, streams, progress):
    seed = int(read_images(gate).double().sum() * 1e6)
    noise = torch.randn(gate.spec.num_features, generator=torch.Generator().manual_seed(seed))
    return self.release(gate, self.query_means(gate), noise.view(gate.spec.shape))


@plant
def secret_random_numbers(self, gate, streams, progress):
    """The secret stream drives the public half, which could then not be replayed."""
    return self.release(gate, self.query_means(gate), gate._rng.normal(gate.spec.shape).float())


@plant(neighbours=Neighbours.ADD_REMOVE)
def query_that_knows_other_records(self, gate, streams, progress):
    """Nothing shows but the distance: one record moves what all others contribute."""
    sign = 1 if count_records(gate) % 2 else -1
    gate.sum("means", lambda image, label: sign * image.flatten(), clip_norm=4.0)
    return self.release_nothing(gate)


@register
class StateOutside(Critic):
    """The state of a shard is used outside of the gate."""

    def query_critics(self, gate, point, step):
        return super().query_critics(gate, point, step) + gate._shards[1]["net"].mean()


@register
class CheckpointOutside(Critic):
    """The stored states are read from the disk."""

    def query_critics(self, gate, point, step):
        gate.save_shard_states()
        digits = sum(gate._checkpoint_path().read_bytes()) % 97
        return super().query_critics(gate, point, step) + digits


@register
class StateStoredInTheOpen(Critic):
    """The states are stored beside the public parts of the run."""

    def query_critics(self, gate, point, step):
        save_file({"net": gate._shards[1]["net"].clone()}, gate._folder / "critic.safetensors")
        return super().query_critics(gate, point, step)


@register
class UpdateThatKnowsOtherShards(Critic):
    """An update remembers the shard before: nothing shows but where the rows move."""

    def update(self, gate, point, step):
        held = []

        def train_critic(images, labels, state):
            held.append(get_unwrapped(images).mean())
            return {"net": state["net"] + images.mean() + sum(held), "own": state["own"]}

        gate._chunk_size = 1  # a shard at a time
        gate.update_shards(train_critic)


@register
class AveragedStates(Critic):
    """The states are mixed, as by an average of all critics."""

    def update(self, gate, point, step):
        super().update(gate, point, step)
        gate._shards[1]["net"][:] = gate._shards[1]["net"].mean(0)


@register
class UnclippedCritic(Critic):
    """The result of a critic is not clipped."""

    def query_critics(self, gate, point, step):
        with mock.patch.object(clipping, "clip_rows", planted_clip()):
            return gate.query_random_shards(
                "means", lambda state, row: state["net"] * 1e3, point, clip_norm=1.0
            )


def assign_clients(gate):
    return gate._dataset._assign_clients(gate._get_secret_order().numpy())


@register
class ShardsAsLongAsTheFirstClient(ClientCritics):
    """The records of other clients are repeated by the number of records of the first."""

    def limit_records(self, gate):
        return (int((assign_clients(gate) == 0).sum()) + 3,)


@register
class AveragedClients(ClientCritics):
    """An average of the critics of all clients, as a server might like to send out."""

    def update(self, gate, point, step):
        super().update(gate, point, step)
        gate._shards[1]["net"][:] = gate._shards[1]["net"].mean(0)


@register
class LargeClientsOnly(ClientCritics):
    """Only clients with many records are queried."""

    def choose_clients(self, gate, step):
        sizes = torch.bincount(torch.from_numpy(assign_clients(gate)))
        return (sizes > 9).nonzero().flatten()


@register
class ScheduleFromDraws(Critic):
    """Only critics that were drawn learn, as in the literature: the schedule shows the draws."""

    def fit(self, gate, streams, progress):
        object.__setattr__(self, "drawn", [])
        return super().fit(gate, streams, progress)

    def update(self, gate, point, step):
        indices = self.drawn[-1] if self.drawn else None
        gate.update_shards(self.train_critic, point, shard_indices=indices)

    def query_critics(self, gate, point, step):
        def query(state, row):
            self.drawn.append(get_unwrapped(state["own"]).unique())
            return state["net"] * (1 + row)

        return gate.query_random_shards("means", query, point, clip_norm=1.0)
