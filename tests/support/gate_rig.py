"""Every operation of the gate behind one call, on a dataset that changes between queries."""

import numpy as np
import torch
from support.fakes import FreePlan, NullLedger

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Stage
from privot.privacy.sampling import Full, Shards
from privot.runtime import Runtime

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
CLASSES = 2
SHARDS = 4
ROWS = 40  # so many that every shard is drawn
SHARD_QUERIES = ("query_random_shards", "sum_over_shards", "query_clients")
CASES = [  # (operation, neighbours, per_class)
    ("sum", ADD_REMOVE, False),
    ("sum", REPLACE, False),
    ("sum", ADD_REMOVE, True),
    ("sum", REPLACE, True),
    ("rows", REPLACE, False),
    ("rows", LOCAL, False),
    ("query_sample", ADD_REMOVE, False),
    ("query_sample", REPLACE, False),
    ("sorted_blocks", REPLACE, False),
    ("query_random_shards", REPLACE, False),
    ("sum_over_shards", REPLACE, False),
    ("query_clients", REPLACE, False),
    ("query_clients", CLIENT, False),
    ("sum_over_shards", CLIENT, False),
]


def center(image, label, scale):
    """Pixels around zero, times a scale: at 1, 2x2 black or white pixels have norm 1."""
    return (image.flatten().double() - 0.5) * scale


def adapt_query(operation, query):
    """A query of one record in the form that an operation asks: a sample or a shard sums it up."""

    def sum_up(images, labels, scale):
        return torch.func.vmap(query, (0, 0, None))(images, labels, scale).sum(0)

    if operation == "query_sample":
        return lambda records, scale: sum_up(records.images, records.labels, scale)
    if operation in SHARD_QUERIES:
        return lambda images, labels, state, scale: {"sum": sum_up(images, labels, scale)}
    return query


class Rig:
    """A gate for one operation; ``dim``: how many numbers the query has."""

    def __init__(
        self,
        operation,
        neighbours,
        per_class=False,
        *,
        query=center,
        noise=0.0,
        sampling=None,
        count=8,
        shape=(1, 2, 2),
        dim=4,
        ledger=None,
    ):
        self.operation = operation
        self.query = adapt_query(operation, query)
        self.count = count
        self.dim = dim
        sizes = (count // CLASSES,) * CLASSES
        declared = {"sorted_blocks": (count, sizes), "rows": (count,)}.get(operation, ())
        has_clients = operation == "query_clients" or neighbours is CLIENT
        self.spec = Spec(shape, CLASSES, *declared, num_clients=SHARDS if has_clients else None)
        self.records_per_shard = count // SHARDS if has_clients else 0
        self.num_shards = SHARDS * (sampling.num_shards if has_clients and sampling else 1)
        how = {"sum": {"per_class": per_class}, "query_sample": {"shape": (dim,)}}
        self.how = how.get(operation, {})
        default = Shards(SHARDS) if operation == "query_random_shards" else Full()
        stage = Stage("it", operation, noise, 10**6, sampling or default)
        self.gate = Gate(
            Sensitive(np.zeros((count, *shape)), np.arange(count) % CLASSES, self.spec),
            FreePlan((stage,), neighbours),
            ledger or NullLedger(),
            NullLedger(),
            runtime=Runtime("cpu", microbatch_size=count + 1),
        )

    def ask(self, images, labels=None, scale=1.0, clip_norm=1.0, **blocks):
        if labels is None:
            labels = np.arange(len(images)) % CLASSES
        self.gate._dataset = Sensitive(images, labels, self.spec)
        ask = getattr(self.gate, self.operation)
        if self.operation in SHARD_QUERIES:
            return self._ask_shards(ask, scale, clip_norm)
        answer = ask("it", self.query, scale, clip_norm=clip_norm, **self.how, **blocks)
        if blocks:  # means become the sums that got the noise
            answer = answer * (self.count // CLASSES // blocks["num_blocks"])
        return answer

    def _ask_shards(self, ask, scale, clip_norm):
        state = {"sum": torch.zeros(self.num_shards, self.dim, dtype=torch.float64)}
        self.gate.split_into_shards(self.num_shards, state, self.records_per_shard)
        self.gate.update_shards(self.query, scale)
        if self.operation == "sum_over_shards":
            return ask("it", lambda state: state["sum"], clip_norm=clip_norm)
        self.gate._rng = SecretRandom(7)  # answers are compared draw by draw
        is_random = self.operation == "query_random_shards"
        rows = torch.zeros(ROWS) if is_random else torch.zeros(SHARDS, 3)
        answer = ask("it", lambda state, row: state["sum"] + row, rows, clip_norm=clip_norm)
        return answer.flatten(0, -2)
