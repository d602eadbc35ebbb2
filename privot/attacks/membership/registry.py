"""Attacks of the owner on their own release: functions from candidates, and what the attacker knows, to scores.

A score is float64, and a higher one means more like a member. What comes of sensitive records is as secret as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from privot.attacks.membership import gan_leaks, lira, loss, nearest, rmia, tracing


class MembershipAttack(NamedTuple):
    """``needs`` says what the attacker must have besides the candidates and their labels.

    ``model`` a classifier trained on the release; ``shadows`` models, or sets, of known members; ``population`` records that nobody
    learned; ``set`` the released images; ``samples`` images that a generator gave; ``generator`` any that can be asked; ``weights`` of the
    generator; ``lpips`` the weights of that network.
    """

    title: str
    needs: tuple[str, ...]
    function: Callable[..., Any]


ATTACKS = {
    "loss": MembershipAttack("loss threshold", ("model",), loss.negative_loss),
    "lira": MembershipAttack("LiRA, online", ("model", "shadows"), lira.lira),
    "lira-offline": MembershipAttack(
        "LiRA, offline", ("model", "shadows"), partial(lira.lira, offline=True)
    ),
    "lira-pixels": MembershipAttack(
        "LiRA on the distance to the nearest released image", ("set", "shadows"), lira.lira
    ),
    "lira-features": MembershipAttack(
        "LiRA on the same distance in random features", ("set", "shadows"), lira.lira
    ),
    "rmia": MembershipAttack("RMIA", ("model", "shadows", "population"), rmia.rmia),
    "nearest-pixels": MembershipAttack(
        "nearest released image in pixels", ("set",), nearest.nearest
    ),
    "nearest-features": MembershipAttack(
        "nearest released image in random features",
        ("set",),
        partial(nearest.nearest, metric="features"),
    ),
    "nearest-lpips": MembershipAttack(
        "nearest released image by LPIPS",
        ("set", "lpips"),
        partial(nearest.nearest, metric="lpips"),
    ),
    "real-start": MembershipAttack("largest cosine to a released image", ("set",), nearest.cosine),
    "tracing": MembershipAttack("tracing by feature means", ("set", "population"), tracing.trace),
    "gan-leaks-full": MembershipAttack(
        "GAN-Leaks, full black box", ("samples",), gan_leaks.full_black_box
    ),
    "gan-leaks-partial": MembershipAttack(
        "GAN-Leaks, partial black box", ("generator",), gan_leaks.partial_black_box
    ),
    "gan-leaks-white": MembershipAttack(
        "GAN-Leaks, white box", ("generator", "weights"), gan_leaks.white_box
    ),
}

__all__ = ["ATTACKS", "MembershipAttack"]
