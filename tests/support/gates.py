"""Gates without noise and limit unless a test says otherwise, and what they are queried with."""

import math

import numpy as np
import torch

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Neighbours, Plan

NO_LIMIT = Budget(math.inf)
DIM = 4  # of an image of 1 x 2 x 2 pixels


def make_records(count, *, num_classes=2, size=None, dtype=np.float32, client_ids=None, **declared):
    """Images of 1 x 2 x 2 random pixels, in classes in turn."""
    images = np.random.default_rng(3).integers(0, 256, (count, 1, 2, 2))
    images = images.astype(np.uint8) if dtype is np.uint8 else (images / 255).astype(dtype)
    spec = Spec((1, 2, 2), num_classes, size, **declared)
    return Sensitive(images, np.arange(count) % num_classes, spec, client_ids=client_ids)


def make_gate(dataset, ledger, *stages, neighbours=Neighbours.REPLACE, target=NO_LIMIT, **more):
    return Gate(dataset, Plan(stages, neighbours), ledger, target, **more)


def flatten_image(image, label, *public):
    return image.flatten()


def list_kinds(ledger, *kinds):
    """The kinds of all lines, or of those of some kinds."""
    return [line["kind"] for line in ledger.entries() if not kinds or line["kind"] in kinds]


def list_marks(ledger, stage="it"):
    """The first and last step of every mark of a stage."""
    lines = [line for line in ledger.entries() if line["kind"] == "ask"]
    return [(line["first"], line["last"]) for line in lines if line["stage"] == stage]


def watch_reads(monkeypatch, note):
    """Call ``note(indices)`` before records are read; gives the list of what it returns."""
    notes = []
    read_records = Sensitive._read_records

    def read(dataset, indices, *more):
        notes.append(note(indices))
        return read_records(dataset, indices, *more)

    monkeypatch.setattr(Sensitive, "_read_records", read)
    return notes


def view_bits(value):
    """The bits of floats, in which NaN equals itself."""
    return value.contiguous().view(torch.int64 if value.dtype == torch.float64 else torch.int32)


# Updates of shards of such images: they see the images and the labels of one shard, and its state


def learn(images, labels, state):
    return {"it": state["it"] + images.flatten(1).mean(0)}


def normalise(images, labels, state):
    """A batch norm, whose batch is this shard."""
    normal = torch.nn.functional.batch_norm(images, None, None, training=True)
    return {"it": normal.flatten(1).sum(0)}


def mix_all(images, labels, state):
    """Sums, sorts and softmaxes over every axis."""
    weights = torch.softmax(images.flatten().sort().values, 0)[-DIM:]
    return {"it": weights * images.sum() / len(labels) + labels.sum()}


def pick_records(images, labels, state):
    """Records at fractions of the shard, as critics draw theirs."""
    indices = (torch.tensor([0.1, 0.5, 0.99]) * len(labels)).long()
    return {"it": images[indices].mean(0).flatten()}


def descend(images, labels, state):
    """A gradient step."""

    def loss(weights):
        return torch.nn.functional.softplus(images.flatten(1) @ weights).sum()

    return {"it": state["it"] - 0.1 * torch.func.grad(loss)(state["it"])}


def explode(images, labels, state):
    """Too large for float32, or NaN, or neither, by the records."""
    return {"it": images.flatten(1).sum(0) * 1e37 / images.amin() - state["it"]}


LEARNERS = [learn, normalise, mix_all, pick_records, descend, explode]
