"""Federated averaging of a critic: what one client computes, as functions of tensors.

`Gate.update_shards` vectorizes them over clients. Records are addressed by fractions, because the
number of a client's records is secret.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import softplus

ClientState = dict[str, Tensor]


def score_images(weights: Tensor, critic: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Score images by a critic with the given weights.

    Args:
        weights: All weights as one vector [num_weights].
        critic: The critic, whose own weights are not used.
        images: Images [batch, channels, height, width].
        labels: Their labels [batch].

    Returns:
        Scores [batch].
    """
    parameters = dict(critic.named_parameters())
    values = weights.split([parameter.numel() for parameter in parameters.values()])
    named_values = {
        name: value.view(parameter.shape)
        for (name, parameter), value in zip(parameters.items(), values, strict=True)
    }
    return functional_call(critic, named_values, (images, labels))


def compute_critic_loss(
    weights: Tensor, critic: nn.Module, real: Tensor, fake: Tensor, labels: Tensor
) -> Tensor:
    """Compute a critic's loss on records and on generated images of the same labels.

    Args:
        weights: Weights of the critic [num_weights].
        critic: The critic.
        real: Records [batch, channels, height, width].
        fake: Generated images [batch, channels, height, width].
        labels: Labels of both [batch].

    Returns:
        The loss [].
    """
    return (
        softplus(-score_images(weights, critic, real, labels)).mean()
        + softplus(score_images(weights, critic, fake, labels)).mean()
    )


def train_client_critic(
    images: Tensor,
    labels: Tensor,
    state: ClientState,
    critic: nn.Module,
    initial_weights: Tensor,
    fakes: Tensor,
    record_fractions: Tensor,
    fake_indices: Tensor,
    learning_rate: float,
) -> ClientState:
    """Train the critic on one client's records and store how its weights changed.

    Args:
        images: Records of the client [size, channels, height, width].
        labels: Their labels [size].
        state: State of the client.
        critic: The critic.
        initial_weights: Weights before the first step [num_weights].
        fakes: Generated images [classes, count, channels, height, width].
        record_fractions: Which records to use, as fractions [steps, batch] in [0, 1).
        fake_indices: Which generated images of the same labels to use [steps, batch].
        learning_rate: Learning rate of gradient descent.

    Returns:
        The state with the new change.
    """
    weights = initial_weights
    for step in range(len(record_fractions)):
        indices = (record_fractions[step] * len(labels)).long()
        gradient = grad(compute_critic_loss)(
            weights,
            critic,
            images[indices],
            fakes[labels[indices], fake_indices[step]],
            labels[indices],
        )
        weights = weights - learning_rate * gradient
    return {**state, "weight_change": weights - initial_weights}


def get_weight_change(state: ClientState) -> Tensor:
    """Return the change that a client sends: [num_weights]."""
    return state["weight_change"]
