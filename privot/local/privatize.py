"""The client's side of local privacy: a data set becomes a file of privatized records, paid for from its own ledger."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from privot.data import Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotWarning, SettingError
from privot.local.channels import Channel, Mixed, RandomizedResponse, Space, known
from privot.local.dataset import Privatized, fresh
from privot.local.signal_check import too_little
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import open_ledger
from privot.privacy.plan import Budget
from privot.progress import round_up
from privot.release import Guarantee
from privot.runtime import Runtime
from privot.synthesis.preflight import LARGE_EPSILON, check_delta

IMAGES = ("laplace", "gaussian")  # channels for values


def channel_for(
    spec: Spec,
    name: str,
    epsilon: float,
    delta: float = 1e-5,
    *,
    labels_epsilon: float | None = None,
    space: str = "plain",
    size: int = 0,
    radius: float | None = None,
    centre: float | None = None,
) -> Channel:
    """A channel for images of a spec: ``epsilon`` for an image and, if its label is sent too, ``labels_epsilon`` for that.

    >>> channel_for(Spec((1, 8, 8), 10), "laplace", 4.0, labels_epsilon=1.0).epsilon.__round__(9)
    5.0
    """
    for word, value in (("epsilon", epsilon), ("labels-epsilon", labels_epsilon)):
        if value is not None and not 0 < value < math.inf:
            raise SettingError(f"{word}={value:g}: give a number above 0, such as 1")
    kind = known(name)
    if name not in IMAGES:
        raise SettingError(
            f"channel {name} is for categories: images go through {' or '.join(IMAGES)}, labels with --labels-epsilon"
        )
    where = Space(kind=space, shape=spec.shape, size=size)
    values: Channel = kind.calibrated(epsilon, delta, space=where, radius=radius, centre=centre)
    if labels_epsilon is None:
        return values
    if spec.classes < 2:
        raise SettingError("labels-epsilon: there is but one class, and nothing to say of it")
    return Mixed(
        parts=(values, RandomizedResponse.calibrated(labels_epsilon, categories=spec.classes))
    )


def privatize(
    data: Sensitive,
    channel: Channel,
    *,
    out: str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    runtime: Runtime | None = None,
    insecure_seed: int | None = None,
    notice: Callable[[str], None] | None = None,
    allow_large_delta: bool = False,
) -> Privatized:
    """Every record once through the channel: what comes back may leave. It is charged to the data set's ledger; a second time adds up.

    The number of records becomes public, and so must have been declared. With ``out`` the file is written there. ``notice`` hears
    cautions before anything is charged; without it they are issued as `PrivotWarning`. A delta above 1e-3 is refused unless it is below
    one over the number of records, or ``allow_large_delta``.

    >>> import tempfile
    >>> from privot.data import load
    >>> digits = load("digits")
    >>> sent = privatize(digits, channel_for(digits.spec, "laplace", 8.0), ledger=tempfile.mkdtemp() + "/digits.jsonl")
    >>> sent.values.shape, sent.channel.epsilon
    (torch.Size([1438, 64]), 8.0)
    """
    if out is not None:
        fresh(out)
    book = open_ledger(data.name, ledger)
    plan = channel.plan()
    check_delta(channel.delta, data.spec.size, allow_large_delta)
    for text in (too_little(channel, data.spec.size or 1), weak_local_promise(channel)):
        if text:
            notice(text) if notice else warnings.warn(text, PrivotWarning, stacklevel=2)
    wall = Budget(channel.epsilon * (1 + 1e-9), channel.delta or 1e-5)
    gate = Gate(
        data,
        plan,
        book,
        wall,
        method=f"privatize {channel.name}",
        runtime=runtime or Runtime("cpu"),
        insecure_seed=insecure_seed,
    )
    values = gate.privatize(channel)
    labelled = channel.columns > data.spec.pixels
    facts: dict[str, Any] = {
        **data.spec.to_json(),
        "class_sizes": None,
    }  # that would tell of the labels
    facts |= {} if labelled else {"classes": 1, "class_names": None}
    sent = Privatized(values, channel, Spec.from_json(facts), data.name, insecure_seed is not None)
    if out is not None:
        sent.save(out)
    return sent


def weak_local_promise(channel: Channel) -> str:
    """What a large epsilon of a channel permits, in one sentence; an empty text where it is 10 at most."""
    if not LARGE_EPSILON < channel.epsilon < math.inf:
        return ""
    power = round_up(100 * channel.plan().cost().tpr(0.01), 3)
    return (
        f"epsilon {round_up(channel.epsilon)} promises little for a record by itself: whether a given record was sent may be told for "
        f"{power} % of them, with 1 % false alarms"
    )


def verified(path: str | Path) -> dict[str, Any]:
    """Check a privatized file, or a folder of them, and compute what its channel proves; needs nothing else."""
    sent = Privatized.load(path)
    claim = certificate(sent.channel)
    facts = {
        "file": str(path),
        "digests": "ok",
        "records": len(sent),
        "channel": sent.channel.parameters(),
    }
    return {**facts, "guarantee": asdict(claim), "epsilon_from_events": claim.epsilon}


def certificate(channel: Channel) -> Guarantee:
    """What a channel proves of one record against any other in its place."""
    return Guarantee.of(channel.plan(), channel.delta)
