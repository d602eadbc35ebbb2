"""Whether an answer could be an honest one: all that a server can check of numbers that came from behind somebody else's gate."""

from __future__ import annotations

import math

from torch import Tensor

from privot.errors import MessageError
from privot.federated.messages import Terms, pack
from privot.privacy.gate import SENSITIVITY
from privot.privacy.noise import FARTHEST

ROOM = 1 << 10  # bytes that a message may have beyond its tensor


def shape_of(terms: Terms) -> list[int]:
    """Of the values of an answer: [classes, rows, channels, h, w]."""
    return [terms.classes, terms.settings.rows, *terms.settings.numbers(terms.spec)]


def longest_message(terms: Terms) -> int:
    """Bytes of the longest message of an owner that can be of use."""
    return max(len(pack(terms)), 4 * math.prod(shape_of(terms))) + ROOM


def longest_slope(terms: Terms) -> float:
    """What no honest slope is longer than: the bound, and noise beyond the end of its law in every number."""
    plan = terms.plan()
    deviation = SENSITIVITY[plan.stages[0].verb, plan.neighbours] * plan.stages[0].noise
    return 1.0 + FARTHEST * deviation * math.sqrt(math.prod(shape_of(terms)[2:]))


def sound(values: Tensor, terms: Terms) -> Tensor:
    """The values of an answer, or `MessageError` with what is wrong with them."""
    if list(values.shape) != (wanted := shape_of(terms)):
        raise MessageError(f"sent values of shape {list(values.shape)} where {wanted} belongs")
    if not values.isfinite().all():
        raise MessageError("sent values that are not finite")
    if (norm := float(values.double().flatten(2).norm(dim=2).max())) > (
        longest := longest_slope(terms)
    ):
        raise MessageError(
            f"sent a slope of norm {norm:.3g}, and none can be longer than {longest:.3g}"
        )
    return values
