"""Whole channels: what 1,000 clients with one record send is told from what 1,000 with the opposite send no better than is claimed."""

import numpy as np
import pytest
import torch

from privot.audit import audit_many_runs
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.local.privatize import build_image_channel, compute_channel_guarantee, privatize

CLIENTS = Spec((1, 4, 4), 2, 1000)
DELTA = 1e-5
CHANNELS = {
    name: build_image_channel(CLIENTS, name, 3.0, DELTA, labels_epsilon=1.0)
    for name in ("laplace", "gaussian")
}


def ratios(channel, made, folder):
    """Log likelihood ratios, by ``channel``, of white records of class 1 against black ones of class 0: in either world, [clients]."""
    pair = torch.stack(
        [torch.full((CLIENTS.num_features + 1,), float(each)) for each in (0, 1)]
    )  # the last column is the label
    found = []
    for number, record in enumerate(pair):
        images = np.full((1000, *CLIENTS.shape), float(record[0]), np.float32)
        box = Sensitive(images, np.full(1000, int(record[-1])), CLIENTS)
        values = privatize(box, made, ledger=folder / f"{made.epsilon:g}-{number}.jsonl").values
        cost = (
            channel.compute_cost_matrix(channel.to_points(pair), values.double())
            / channel.temperature
        )  # [2, clients]
        found.append((cost[0] - cost[1]).numpy())
    return found[1], found[0]


@pytest.mark.parametrize("name", CHANNELS)
def test_the_claim_holds_and_what_hides_nothing_is_seen(name, trust, tmp_path):
    channel = CHANNELS[name]
    claim = compute_channel_guarantee(channel)
    found = audit_many_runs(*ratios(channel, channel, tmp_path), claim.delta, threshold=0.0)
    assert found.epsilon <= claim.epsilon, (
        f"{name}: {found.epsilon:.2f} was proved of a claim of {claim.epsilon:.2f}"
    )
    assert found.epsilon > 0.1 * claim.epsilon, f"{name}: the test is nearly blind"
    loud = audit_many_runs(
        *ratios(channel, channel.with_epsilon(100.0), tmp_path), claim.delta, threshold=0.0
    )
    assert loud.epsilon >= 4.0, (
        f"{name}: {loud.epsilon:.2f} was proved of a channel that hides next to nothing"
    )
    told = f"channel {name}: {found.epsilon:.2f} proved of {claim.epsilon:.2f} claimed, 1,000 runs a side"
    trust("G7", "audits of whole channels under their claim", 1, of=1, note=told)
    told = f"channel {name}: {loud.epsilon:.2f} of at most {loud.ceiling:.2f}"
    trust("G7", "controls without noise that prove 4 or more", 1, of=1, note=told)
