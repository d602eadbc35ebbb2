"""A federation in one process: digits dealt to a few owners with tiny critics, and messages that tests can alter."""

import os
from functools import cache

import numpy as np
import torch

from privot.data import load_dataset
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.federated import Answer, Client, Request, Server, Terms, pack_message, unpack_message
from privot.methods import make_method
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.runtime import Runtime, Streams

TINY = {
    "noise_multiplier": 8.0,
    "rounds": 3,
    "critic_steps": 1,
    "warmup_rounds": 1,
    "critic_batch_size": 4,
    "critic_channels": 4,
    "generator_channels": 4,
    "latent_dim": 4,
    "records_per_critic": 16,
}
SHAPE = (1, 8, 8)
CLASSES = 10
DEVICE = os.environ.get("PRIVOT_DEVICE", "cpu")  # bytes repeat on a CPU alone
RUN = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2
ROOMY = Budget(100.0, 1e-5)


def terms(owners=3, run=RUN, shape=SHAPE, classes=CLASSES, **settings):
    return Terms(run, make_method("federated-gs-wgan", TINY | settings), shape, classes, owners)


def compute_price(terms):
    """The epsilon of a whole run."""
    return float(terms.plan().cost().epsilon(1e-5))


@cache
def _load_digits():
    records = load_dataset("digits")._read_records(slice(None))
    return records.images.numpy(), records.labels.numpy()


def make_dataset(index=0, owners=3):
    """The digits of one owner, sealed."""
    images, labels = _load_digits()
    return Sensitive(
        images[index::owners], labels[index::owners], Spec(SHAPE, CLASSES), name=f"ward {index}"
    )


class Ward:
    """An owner with its folder and ledger; `again` is a new process on the same disk."""

    def __init__(self, folder, index=0, owners=3, budget=ROOMY, **more):
        self.folder = folder
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.warnings = []
        self._make_client = lambda: Client(
            make_dataset(index, owners),
            budget,
            Ledger(folder / "ledger.jsonl"),
            folder / "run",
            Runtime(DEVICE),
            on_warning=self.warnings.append,
            **more,
        )
        self.again()

    def again(self):
        self.owner = self._make_client()
        return self

    def reply(self, raw):
        return self.owner.reply(raw)

    def spent(self, delta=1e-5):
        return float(self.ledger.compute_spent_cost().epsilon(delta))

    def rows(self):
        """The number of answers that the ledger has marked."""
        asks = [entry["last"] + 1 for entry in self.ledger.entries() if entry["kind"] == "ask"]
        return max(asks, default=0)


def wards(tmp_path, owners=3, **more):
    return {
        f"ward {index}": Ward(tmp_path / f"ward{index}", index, owners, **more)
        for index in range(owners)
    }


def serving(agreed, names, tmp_path=None, **more):
    return Server(
        agreed, list(names), Streams(0, Runtime(DEVICE)), tmp_path and tmp_path / "server", **more
    )


def serve_consenting(agreed, names, tmp_path=None, **more):
    """A server to whose terms everybody has agreed."""
    server = serving(agreed, names, tmp_path, **more)
    for name, offer in server.pack_offers().items():
        assert server.receive_consent(name, offer) is None
    return server


def consent(server, everyone):
    for name, offer in server.pack_offers().items():
        server.receive_consent(name, everyone[name].reply(offer))


def play(server, everyone):
    """All rounds, honestly."""
    consent(server, everyone)
    while not server.is_finished:
        for name, request in server.pack_requests().items():
            server.receive(name, everyone[name].reply(request))
        server.end_round()
    return server.build_release()


def plausible(terms, number, seed=0):
    """An answer that no server could tell from an honest one: noise alone."""
    shape = (
        terms.num_classes,
        terms.settings.batch_per_class,
        *terms.settings.compute_gradient_shape(terms.spec),
    )
    values = (
        2
        * terms.settings.noise_multiplier
        * torch.randn(shape, generator=torch.Generator().manual_seed(1000 * number + seed))
    )
    return Answer(terms.run_id, number, values.float())


def refusal(raw):
    """The reason, of bytes that must be a refusal."""
    message = unpack_message(raw)
    assert message.kind == "refusal", message.kind
    return message.reason


def is_answer(raw):
    return unpack_message(raw).kind == "answer"


def images(terms, seed=0, **other):
    shape = (
        other.get("classes", terms.num_classes),
        other.get("batch_per_class", terms.settings.batch_per_class),
        *other.get("shape", terms.shape),
    )
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def pack_request(number, seed=0, agreed=None, run=RUN, **other):
    """A request of this round as bytes, under the default terms or those given."""
    return pack_message(
        Request(run, number, images(agreed or terms(), seed + 100 * number, **other))
    )
