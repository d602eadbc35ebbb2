"""Zero has a sign, which must say nothing: an answer of -0.0 would come of a total of -0.0 alone."""

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


class FaintRandom(SecretRandom):
    """Noise that rounds to no step of the grid, from below."""

    def normal(self, shape, device="cpu"):
        return torch.full(shape, -1e-12, dtype=torch.float64)


@pytest.mark.parametrize("zero", [-0.0, 0.0])
def test_both_zeros_come_out_alike(zero):
    total = torch.tensor([zero, 3.0, -3.0], dtype=torch.float64)
    noisy = add_noise(total, 2.0, 2.0**-24, FaintRandom())
    assert torch.signbit(noisy).tolist() == [False, False, True]


@pytest.mark.parametrize("seen", [True, False])
def test_a_class_that_a_client_has_no_record_of_leaves_no_sign(seen):
    """Its gradient is a gradient times 0, whose zeros keep their signs."""
    critic = Critic((1, 8, 8), 2, 4)
    basis = torch.eye(8)
    weights, left_vectors = critic.init_weights(1, draw := torch.Generator().manual_seed(0))
    pixels = np.zeros((4, 1, 8, 8), np.uint8)
    dataset = Sensitive(pixels, np.zeros(4, int), Spec((1, 8, 8), 2))
    plan = Plan((Stage("gradients", "query_clients", 1.0, 9),), Neighbours.CLIENT)
    gate = Gate(dataset, plan, NullLedger(), Budget(math.inf))
    state = {
        "weights": torch.randn(weights.shape, generator=draw),
        "left_vectors": left_vectors,
        "seen_classes": torch.tensor([[seen, True]]),
    }
    gate.split_into_shards(1, state, 4)
    gate._rng = FaintRandom()
    answer = gate.query_clients(
        "gradients",
        lambda state, image, label: masked_gradient(
            state,
            image,
            label,
            normalize_gradients=True,
            mask_missing_classes=True,
            critic=critic,
            row_basis=basis,
            column_basis=basis,
        ),
        torch.rand(1, 1, 1, 8, 8, generator=draw),
        torch.zeros(1, 1, dtype=torch.int64),
        clip_norm=1.0,
    )
    assert bool((answer != 0).any()) is seen
    assert not torch.signbit(answer[answer == 0]).any()
