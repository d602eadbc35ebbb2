"""Accuracy on a sensitive test set as a release of its own: through the gate, with noise, paid for from that set's ledger."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from privot.data import catalogue
from privot.data.dataset import Sensitive
from privot.errors import SettingError
from privot.measures.downstream import NETWORKS, trained
from privot.measures.result import Reading
from privot.measures.samples import Subject, matching
from privot.nets.training import Classifier
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import open_ledger
from privot.privacy.plan import Plan, Stage, Wall
from privot.runtime import Progress, Runtime, silent


def paid_accuracy(
    subject: Subject,
    test: Sensitive,
    budget: Wall,
    names: Sequence[str] = ("cnn",),
    *,
    ledger: Ledger | str | Path | None = None,
    runtime: Runtime | None = None,
    seed: int = 0,
    progress: Progress = silent,
    insecure_seed: int | None = None,
) -> list[Reading]:
    r"""Accuracies of networks trained on released images, counted on sensitive records: publishable, at the price of ``budget``.

    Each record's part is the vector of hits of the networks, and a one for the count where the size is not declared; its norm is at
    most :math:`\sqrt{k+1}`, so one Gaussian `sum` answers for all of them. No check of the test records is made on the way, since its
    outcome would be an answer too.
    """
    networks = [name for name in names if name in NETWORKS]
    if not networks or len(networks) < len(names):
        raise SettingError(f"paid accuracy is of networks: {', '.join(NETWORKS)}")
    book = open_ledger(test.name, ledger)
    matching(subject, test)
    runtime = runtime or Runtime()
    start = time.perf_counter()
    plan = Plan((Stage("hits", "sum", 1.0),), Neighbours.REPLACE).calibrated(budget)
    book.ready()  # a ledger that cannot be written is noticed before the work
    book.check(plan, method="paid accuracy", seeded=insecure_seed is not None)
    gate = Gate(
        test,
        plan,
        book,
        budget,
        method="paid accuracy",
        runtime=runtime,
        insecure_seed=insecure_seed,
    )
    released = (subject.images, subject.labels, test.spec)
    made = [
        trained(name, *released, runtime.target, seed, progress, soft=subject.soft)
        for name in networks
    ]
    counted = test.spec.size is None
    bound = math.sqrt(len(networks) + counted)
    answer = gate.sum("hits", _hits, [net for net, _ in made], counted, bound=bound).double().cpu()
    size = max(1.0, answer[-1].item()) if test.spec.size is None else float(test.spec.size)
    noise = plan.stages[0].noise * 2 * bound / size
    price = float(plan.cost().epsilon(budget.delta))
    spent = (
        math.ceil(price * 1000 - 1e-3) / 1000 if price < math.inf else price
    )  # never less than was charged
    paid = f"through the gate at epsilon {spent:g} of the test data, delta {budget.delta:g}, replace neighbours"
    name_of = (
        test.name if test.name.removesuffix("/test") in catalogue() else "the owner's test data"
    )  # a file's name may tell too much
    publishable = subject.public and insecure_seed is None and plan.stages[0].noise > 0
    found = []
    for place, name in enumerate(networks):
        value = min(1.0, max(0.0, answer[place].item() / size))
        error = math.sqrt(value * (1 - value) / size + noise**2 * (1 + value**2 * counted))
        took = time.perf_counter() - start
        ruler = f"{made[place][1]}; {paid}"
        found.append(
            Reading(
                f"{name}_accuracy",
                value,
                error,
                len(subject.labels),
                name_of,
                round(size),
                publishable,
                ruler,
                seconds=took,
            )
        )
    return found


def _hits(image: Tensor, label: Tensor, classifiers: list[Classifier], counted: bool) -> Tensor:
    hits = [
        each.net(((image - each.mean) / each.std)[None])[0].argmax() == label
        for each in classifiers
    ]
    return torch.stack([*hits, *[torch.ones_like(hits[0])] * counted]).float()
