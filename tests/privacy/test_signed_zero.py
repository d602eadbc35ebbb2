"""Zero has a sign in floating point, and it must say nothing: an answer of -0.0 would come of a total of -0.0 alone."""

import math

import numpy as np
import pytest
import torch
from support.fakes import NullLedger

from privot.components.client_critics import masked_gradient
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.nets.functional_critic import Critic
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.noise import SecretRandom, add_noise
from privot.privacy.plan import Budget, Plan, Stage

LITTLE = -1e-12  # noise that rounds to no step of the grid, from below


class Little(SecretRandom):
    def normal(self, shape, device="cpu"):
        return torch.full(shape, LITTLE, dtype=torch.float64)


def signs(value):
    return torch.signbit(value).tolist()


@pytest.mark.parametrize("total", [-0.0, 0.0])
def test_both_zeros_come_out_alike(total):
    found = add_noise(
        torch.tensor([total, 3.0, -3.0], dtype=torch.float64), 2.0, 2.0**-24, Little()
    )
    assert signs(found) == [False, False, True]


@pytest.mark.parametrize("known", [True, False])
def test_a_class_that_an_owner_has_no_record_of_leaves_no_sign(known):
    """Its slope is a slope times 0, whose zeros keep their signs."""
    critic = Critic((1, 8, 8), 2, 4)
    eye = torch.eye(8)
    weights, along = critic.init_weights(1, draws := torch.Generator().manual_seed(0))
    box = Sensitive(np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, int), Spec((1, 8, 8), 2))
    gate = Gate(
        box,
        Plan((Stage("slopes", "query_clients", 1.0, 9),), Neighbours.CLIENT),
        NullLedger(),
        Budget(math.inf),
    )
    gate.split_into_shards(
        1,
        {
            "weights": torch.randn(weights.shape, generator=draws),
            "left_vectors": along,
            "seen_classes": torch.tensor([[known, True]]),
        },
        4,
    )
    gate._rng = Little()
    raw = gate.query_clients(
        "slopes",
        lambda state, image, label: masked_gradient(
            state,
            image,
            label,
            normalize_gradients=True,
            mask_missing_classes=True,
            critic=critic,
            row_basis=eye,
            column_basis=eye,
        ),
        torch.rand(1, 1, 1, 8, 8, generator=draws),
        torch.zeros(1, 1, dtype=torch.int64),
        clip_norm=1.0,
    )
    assert bool((raw != 0).any()) is known
    assert not torch.signbit(raw[raw == 0]).any()
