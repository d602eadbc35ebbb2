"""A federation in one process: digits dealt to a few owners with tiny critics, and a wire that tests can tamper with."""

import os
from functools import cache

import numpy as np
import torch

from privot.data import load
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.federated import Answer, Owner, Server, Terms, unpack
from privot.methods import make
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.runtime import Runtime, Streams

TINY = {
    "noise": 8.0,
    "rounds": 3,
    "lessons": 1,
    "warm": 1,
    "critic_batch": 4,
    "width": 4,
    "channels": 4,
    "code": 4,
    "records": 16,
}
SHAPE = (1, 8, 8)
CLASSES = 10
DEVICE = os.environ.get(
    "PRIVOT_DEVICE", "cpu"
)  # tests of bytes that come again hold on a CPU alone
RUN = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2
ROOMY = Budget(100.0, 1e-5)


def terms(owners=3, run=RUN, shape=SHAPE, classes=CLASSES, **settings):
    return Terms(run, make("federated-gs-wgan", TINY | settings), shape, classes, owners)


@cache
def _digits():
    records = load("digits")._take(slice(None))
    return records.images.numpy(), records.labels.numpy()


def box(place=0, owners=3):
    """What one owner of digits holds, sealed."""
    images, labels = _digits()
    return Sensitive(
        images[place::owners], labels[place::owners], Spec(SHAPE, CLASSES), name=f"ward {place}"
    )


class Ward:
    """An owner with its folder and ledger; `again` is a new process on the same disk."""

    def __init__(self, folder, place=0, owners=3, wall=ROOMY, data=None, **more):
        self.folder = folder
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.heard = []
        self._make = lambda: Owner(
            data or box(place, owners),
            wall,
            Ledger(folder / "ledger.jsonl"),
            folder / "run",
            Runtime(DEVICE),
            notice=self.heard.append,
            **more,
        )
        self.again()

    def again(self):
        self.owner = self._make()
        return self

    def reply(self, raw):
        return self.owner.reply(raw)

    def spent(self, delta=1e-5):
        return float(self.ledger.spent().epsilon(delta))

    def rows(self):
        """How many answers the ledger has marked."""
        return max(
            (each["last"] + 1 for each in self.ledger.entries() if each["kind"] == "ask"), default=0
        )


def wards(tmp_path, owners=3, **more):
    return {
        f"ward {place}": Ward(tmp_path / f"ward{place}", place, owners, **more)
        for place in range(owners)
    }


def serving(agreed, names, tmp_path=None, **more):
    return Server(
        agreed, list(names), Streams(0, Runtime(DEVICE)), tmp_path and tmp_path / "server", **more
    )


def consent(server, everyone):
    for name, offer in server.offers().items():
        server.accept(name, everyone[name].reply(offer))


def play(server, everyone):
    """All rounds, honestly."""
    consent(server, everyone)
    while not server.done:
        for name, request in server.ask().items():
            server.take(name, everyone[name].reply(request))
        server.close()
    return server.finish()


def plausible(terms, number, seed=0):
    """An answer that no server could tell from an honest one: noise alone."""
    shape = (terms.classes, terms.settings.rows, *terms.settings.numbers(terms.spec))
    values = (
        2
        * terms.settings.noise
        * torch.randn(shape, generator=torch.Generator().manual_seed(1000 * number + seed))
    )
    return Answer(terms.run, number, values.float())


def refusal(raw):
    """The reason, of bytes that must be a refusal."""
    said = unpack(raw)
    assert said.kind == "refusal", said.kind
    return said.reason


def images(terms, seed=0, **other):
    shape = (
        other.get("classes", terms.classes),
        other.get("rows", terms.settings.rows),
        *other.get("shape", terms.shape),
    )
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))
