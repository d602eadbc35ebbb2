"""DP-SGD: train a network by noisy sums of clipped per-example gradients.

The gate samples records, clips each record's gradient, adds the gradients up and adds noise. The
result is public, and so is everything that an optimizer computes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from privot.privacy.gate import Gate

# (network as a function of batches, image [1, ...], label [1]) to a loss []
RecordLoss = Callable[..., Tensor]


def compute_per_example_gradient(
    image: Tensor,
    label: Tensor,
    net: nn.Module,
    weights: dict[str, Tensor],
    loss: RecordLoss,
    public_gradient: Tensor | None,
) -> Tensor:
    """Compute the gradient of one record's loss with respect to all weights.

    Args:
        image: One image [...].
        label: Its label [].
        net: The network.
        weights: The weights of the network, by name.
        loss: The loss of one record.
        public_gradient: A public vector [num_weights] to add, the same for every record, or None.

    Returns:
        The gradient [num_weights].

    >>> net = nn.Linear(3, 1)
    >>> weights = dict(net.named_parameters())
    >>> compute_per_example_gradient(
    ...     torch.ones(3), torch.tensor(0), net, weights, lambda net, x, y: net(x).sum(), None
    ... ).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def evaluate_loss(weights: dict[str, Tensor]) -> Tensor:
        return loss(lambda *inputs: functional_call(net, weights, inputs), image[None], label[None])

    gradient = flatten_tensors(grad(evaluate_loss)(weights).values())
    return gradient if public_gradient is None else gradient + public_gradient


def flatten_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the elements of all tensors to one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def detach_weights(net: nn.Module) -> dict[str, Tensor]:
    """Return the network's weights by name, detached. They share memory with the network."""
    return {name: value.detach() for name, value in net.named_parameters()}


def dp_sgd_step(
    gate: Gate,
    stage: str,
    net: nn.Module,
    loss: RecordLoss,
    optimizer: Any,
    *,
    clip_norm: float,
    public_gradient: Tensor | None = None,
) -> None:
    """Query one noisy gradient and take one optimizer step with it.

    The query result is a sum and not a mean, since the number of records may be secret. Adam's
    step does not depend on the scale of the gradient.

    Args:
        gate: The gate in front of the records.
        stage: Stage of the plan that the query belongs to.
        net: The network to train, in place.
        loss: The loss of one record.
        optimizer: Optimizer of the network's parameters.
        clip_norm: Largest L2 norm of one record's gradient.
        public_gradient: A public vector [num_weights] added to each record's gradient before
            clipping, or None.
    """
    noisy_sum = gate.sum(
        stage,
        compute_per_example_gradient,
        net,
        detach_weights(net),
        loss,
        public_gradient,
        clip_norm=clip_norm,
    ).float()
    parameters = list(net.parameters())
    gradients = noisy_sum.split([parameter.numel() for parameter in parameters])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.view_as(parameter)
    optimizer.step()
