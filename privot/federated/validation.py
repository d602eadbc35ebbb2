"""Checks that a server can make on an answer: shape, finite values and the largest honest norm."""

from __future__ import annotations

import math

from torch import Tensor

from privot.errors import MessageError
from privot.federated.messages import Terms, pack_message
from privot.privacy.noise import MAX_NORMAL
from privot.privacy.sensitivity import SENSITIVITY

MESSAGE_OVERHEAD_BYTES = 1 << 10  # bytes that a message may have beyond its tensor


def get_answer_shape(terms: Terms) -> list[int]:
    """Compute the shape of an answer's gradients: [classes, batch, channels, rows, columns]."""
    return [
        terms.num_classes,
        terms.settings.batch_per_class,
        *terms.settings.compute_gradient_shape(terms.spec),
    ]


def compute_max_message_bytes(terms: Terms) -> int:
    """Compute the length in bytes of the longest useful message from a client."""
    return (
        max(len(pack_message(terms)), 4 * math.prod(get_answer_shape(terms)))
        + MESSAGE_OVERHEAD_BYTES
    )


def compute_max_gradient_norm(terms: Terms) -> float:
    """Compute an upper bound of the norm of an honest gradient.

    The bound is the clipping norm plus noise of the largest magnitude that the sampler can give in
    every coordinate.
    """
    plan = terms.plan()
    stage = plan.stages[0]
    standard_deviation = SENSITIVITY[stage.operation, plan.neighbours] * stage.noise_multiplier
    num_coordinates = math.prod(get_answer_shape(terms)[2:])
    return 1.0 + MAX_NORMAL * standard_deviation * math.sqrt(num_coordinates)


def validate_gradients(gradients: Tensor, terms: Terms) -> Tensor:
    """Return the gradients of an answer if they can be honest.

    Raises:
        MessageError: The shape is wrong, a value is not finite, or a norm is too large.
    """
    expected_shape = get_answer_shape(terms)
    if list(gradients.shape) != expected_shape:
        raise MessageError(
            f"sent gradients of shape {list(gradients.shape)}; {expected_shape} is needed"
        )
    if not gradients.isfinite().all():
        raise MessageError("sent gradients that are not finite")
    norm = float(gradients.double().flatten(2).norm(dim=2).max())
    max_norm = compute_max_gradient_norm(terms)
    if norm > max_norm:
        raise MessageError(f"sent a gradient of norm {norm:.3g}; {max_norm:.3g} is the maximum")
    return gradients
