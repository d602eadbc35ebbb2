"""A control for attacks on a transcript: invert the raw weight gradient of a client's critic.

It shows what a client would reveal in plain federated learning.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import vmap

from privot.attacks.inversion.attacks import InversionAttack, invert
from privot.attacks.inversion.problem import Problem
from privot.components.critic_training import CriticState
from privot.data.dataset import Records
from privot.federated.messages import Terms
from privot.nets.functional_critic import Critic
from privot.progress import Progress, ignore_progress

# The gradient of a critic is long, and full steps of L-BFGS leave the valley of the objective: on
# FEMNIST they reach 16 dB, and these steps more than 20.
LBFGS_LEARNING_RATE = 0.1
LBFGS_STEPS = 1500


class CriticClassifier(nn.Module):
    """A critic as a classifier: the score of each image under every label is its logit.

    Args:
        critic: The architecture.
        weights: Flat weights of the critic.
        left_vectors: Vectors of the power iteration.
    """

    def __init__(self, critic: Critic, weights: Tensor, left_vectors: Tensor):
        super().__init__()
        self.critic = critic
        self.weights = nn.Parameter(weights.detach().clone())
        self.left_vectors: Tensor
        self.register_buffer("left_vectors", left_vectors.detach().clone())

    def forward(self, images: Tensor) -> Tensor:
        """Compute scores [batch, classes] of images [batch, ...]."""
        labels = torch.arange(self.critic.classes, device=images.device)

        def score_label(label: Tensor) -> Tensor:
            return self.critic.score(
                self.weights, self.left_vectors, images, label.expand(len(images))
            )

        return vmap(score_label)(labels).T


def compute_real_score_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute -E D(x, y), the part of a critic's loss that depends on the records.

    The other part is about generated images, which the server knows.
    """
    return -scores.gather(1, labels[:, None]).mean()


def invert_critic_gradient(
    terms: Terms,
    state: CriticState,
    records: Records,
    attack: InversionAttack,
    device: torch.device,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> Tensor:
    """Search for images from the gradient of a critic's loss with respect to its weights.

    The attacker is given the labels, which the gradient of the last layer reveals.

    Args:
        terms: Terms of the run.
        state: State of the critic.
        records: The true records.
        attack: The search.
        device: Where to compute.
        seed: Seed of the search.
        progress: Shows the progress.

    Returns:
        Images [count, c, h, w], clamped to [0, 1], on the CPU.
    """
    model = CriticClassifier(
        Critic(terms.shape, terms.num_classes, terms.settings.critic_channels),
        state["weights"],
        state["left_vectors"],
    ).to(device)
    images = records.images[:, None].to(device)
    labels = records.labels[:, None].to(device)
    problem = Problem.from_images(
        model, compute_real_score_loss, images, labels, classes=max(2, terms.num_classes)
    )
    phases = tuple(
        replace(phase, learning_rate=LBFGS_LEARNING_RATE, steps=LBFGS_STEPS)
        if phase.optimizer == "lbfgs"
        else phase
        for phase in attack.phases
    )
    reconstruction = invert(
        problem, replace(attack, phases=phases), labels=labels, seed=seed, progress=progress
    )
    return reconstruction.images[:, 0].clamp(0, 1).cpu()
