"""The client's side of local privacy: privatize the records of a data set into a file.

The run is charged to the ledger of the data set.
"""

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
from privot.local.channels import (
    Channel,
    Composite,
    Projection,
    RandomizedResponse,
    get_channel_class,
)
from privot.local.dataset import PrivatizedDataset, check_new_privatized_path
from privot.local.signal_check import warn_if_too_noisy
from privot.privacy.gate import Gate
from privot.privacy.guarantee import LARGE_EPSILON, Guarantee, check_delta
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import open_ledger
from privot.privacy.plan import Budget
from privot.progress import round_up
from privot.runtime import Runtime

IMAGE_CHANNELS = ("laplace", "gaussian")


def build_image_channel(
    spec: Spec,
    channel_name: str,
    epsilon: float,
    delta: float = 1e-5,
    *,
    labels_epsilon: float | None = None,
    projection_kind: str = "identity",
    projection_side: int = 0,
    radius: float | None = None,
    center: float | None = None,
) -> Channel:
    """Build a channel for images, and for their labels if these are sent too.

    >>> spec = Spec((1, 8, 8), 10)
    >>> build_image_channel(spec, "laplace", 4.0, labels_epsilon=1.0).epsilon.__round__(9)
    5.0

    Args:
        spec: Shape and classes of the images.
        channel_name: ``laplace`` or ``gaussian``.
        epsilon: Epsilon of an image.
        delta: Delta of an image, for ``gaussian``.
        labels_epsilon: Epsilon of a label, which randomized response adds; None: no labels.
        projection_kind: ``identity``, ``pooled`` or ``dct``; see `Projection`.
        projection_side: Pixels or frequencies a side of the projection.
        radius: Radius of the ball that projected records are scaled into; None: no ball.
        center: Centre of that ball, as one gray level; None: the middle of the domain.

    Returns:
        The channel of a record.

    Raises:
        SettingError: If an argument is out of range.
    """
    for option, value in (("epsilon", epsilon), ("labels-epsilon", labels_epsilon)):
        if value is not None and not 0 < value < math.inf:
            raise SettingError(f"{option}={value:g}: give a number above 0, such as 1.")
    channel_class = get_channel_class(channel_name)
    if channel_name not in IMAGE_CHANNELS:
        raise SettingError(
            f"channel={channel_name}: it is for categories. Use {' or '.join(IMAGE_CHANNELS)} for "
            "images, and --labels-epsilon for their labels."
        )
    image_channel: Channel = channel_class.calibrate(
        epsilon,
        delta,
        projection=Projection(kind=projection_kind, shape=spec.shape, side=projection_side),
        radius=radius,
        center=center,
    )
    if labels_epsilon is None:
        return image_channel
    if spec.num_classes < 2:
        raise SettingError(
            "labels-epsilon: the data has one class only, so labels say nothing. Leave it out."
        )
    label_channel = RandomizedResponse.calibrate(labels_epsilon, num_categories=spec.num_classes)
    return Composite(parts=(image_channel, label_channel))


def privatize(
    data: Sensitive,
    channel: Channel,
    *,
    out: str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    runtime: Runtime | None = None,
    insecure_seed: int | None = None,
    on_warning: Callable[[str], None] | None = None,
    allow_large_delta: bool = False,
) -> PrivatizedDataset:
    """Send every record once through a channel. The result may leave.

    The run is charged to the ledger of the data set; a second run adds to the first. The number of
    records becomes public, so it must have been declared.

    >>> import tempfile
    >>> from privot.data import load_dataset
    >>> digits = load_dataset("digits")
    >>> pooled = {"projection_kind": "pooled", "projection_side": 4}
    >>> channel = build_image_channel(digits.spec, "laplace", 8.0, **pooled)
    >>> sent = privatize(digits, channel, ledger=tempfile.mkdtemp() + "/digits.jsonl")
    >>> sent.values.shape, sent.channel.epsilon
    (torch.Size([1438, 4]), 8.0)

    Args:
        data: The records.
        channel: The channel of a record.
        out: The file to write; None: none.
        ledger: A ledger other than that of the data set.
        runtime: Where to compute; the CPU by default.
        insecure_seed: Seed of the noise, for tests. Seeded noise gives no guarantee.
        on_warning: Receives warnings before anything is charged; by default they are issued as
            `PrivotWarning`.
        allow_large_delta: Accept a delta above 1e-3 that is not below 1 / number of records.

    Returns:
        What the clients send, with the channel.

    Raises:
        SettingError: If the delta is too large.
        BudgetError: If the ledger does not allow the run.
    """
    if out is not None:
        check_new_privatized_path(out)
    opened_ledger = open_ledger(data.name, ledger)
    check_delta(channel.delta, data.spec.size, allow_large_delta)
    for text in (
        warn_if_too_noisy(channel, data.spec.size or 1),
        warn_if_weak_local_guarantee(channel),
    ):
        if text and on_warning:
            on_warning(text)
        elif text:
            warnings.warn(text, PrivotWarning, stacklevel=2)
    gate = Gate(
        data,
        channel.plan(),
        opened_ledger,
        Budget(channel.epsilon * (1 + 1e-9), channel.delta or 1e-5),
        method=f"privatize {channel.name}",
        runtime=runtime or Runtime("cpu"),
        insecure_seed=insecure_seed,
    )
    values = gate.privatize(channel)
    spec_fields = {**data.spec.to_json(), "class_sizes": None}  # class sizes would reveal labels
    if channel.record_dim <= data.spec.num_features:  # no labels are sent
        spec_fields |= {"num_classes": 1, "class_names": None}
    spec = Spec.from_json(spec_fields)
    privatized = PrivatizedDataset(values, channel, spec, data.name, insecure_seed is not None)
    if out is not None:
        privatized.save(out)
    return privatized


def warn_if_weak_local_guarantee(channel: Channel) -> str:
    """State what a large epsilon of a channel permits.

    Returns:
        One or two sentences if epsilon is finite and above 10, else an empty text.
    """
    if not LARGE_EPSILON < channel.epsilon < math.inf:
        return ""
    percent = round_up(100 * channel.plan().cost().max_tpr(0.01), 3)
    return (
        f"epsilon {round_up(channel.epsilon)} is a weak guarantee for a single record: an attack "
        f"with 1 % false positives may detect {percent} % of the records that were sent."
    )


def verify_privatized(path: str | Path) -> dict[str, Any]:
    """Check a privatized file, or a folder of them, and compute what its channel proves.

    Args:
        path: The file or folder.

    Returns:
        Plain data with the number of records, the channel and the guarantee.

    Raises:
        DataError: If a file is damaged or was not made by its channel.
    """
    privatized = PrivatizedDataset.load(path)
    guarantee = compute_channel_guarantee(privatized.channel)
    return {
        "file": str(path),
        "digests": "ok",
        "records": len(privatized),
        "channel": privatized.channel.to_json(),
        "guarantee": asdict(guarantee),
        "epsilon_from_events": guarantee.epsilon,
    }


def compute_channel_guarantee(channel: Channel) -> Guarantee:
    """Compute what a channel proves of one record against any other in its place."""
    return Guarantee.from_plan(channel.plan(), channel.delta)
