"""Whole channels: what 1,000 clients with one record send differs from what 1,000 with the opposite send no more than is claimed."""

import numpy as np
import pytest
import torch

from privot.audit import audit_many_runs
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.local.privatize import build_image_channel, compute_channel_guarantee, privatize

CLIENTS = Spec((1, 4, 4), 2, 1000)
DELTA = 1e-5


def audit(channel, used, folder, delta):
    """Audit the channel ``used`` by the log likelihood ratio, under ``channel``, of white records of class 1 and black ones of class 0."""
    # the last column is the label
    pair = torch.arange(2.0)[:, None].expand(2, CLIENTS.num_features + 1)
    scores = []
    for value in (1, 0):
        images = np.full((1000, *CLIENTS.shape), value, np.float32)
        dataset = Sensitive(images, np.full(1000, value), CLIENTS)
        sent = privatize(dataset, used, ledger=folder / f"{used.epsilon:g}-{value}.jsonl").values
        costs = channel.compute_cost_matrix(channel.to_points(pair), sent.double())
        scores.append(((costs[0] - costs[1]) / channel.temperature).numpy())
    return audit_many_runs(*scores, delta, threshold=0.0)


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_the_claim_holds_and_what_hides_nothing_is_seen(name, trust, tmp_path):
    channel = build_image_channel(CLIENTS, name, 3.0, DELTA, labels_epsilon=1.0)
    claim = compute_channel_guarantee(channel)
    honest = audit(channel, channel, tmp_path, claim.delta)
    assert 0.1 * claim.epsilon < honest.epsilon <= claim.epsilon
    loud = audit(channel, channel.with_epsilon(100.0), tmp_path, claim.delta)
    assert loud.epsilon >= 4.0
    figures = f"{honest.epsilon:.2f} proved of {claim.epsilon:.2f} claimed, 1,000 runs a side"
    note = f"channel {name}: {figures}"
    trust("G7", "audits of whole channels under their claim", 1, of=1, note=note)
    note = f"channel {name}: {loud.epsilon:.2f} of at most {loud.ceiling:.2f}"
    trust("G7", "controls without noise that prove 4 or more", 1, of=1, note=note)
