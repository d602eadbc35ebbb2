"""Registry of membership attacks.

An attack is a function from candidates, and what the attacker has, to float64 scores; a higher
score means a likelier member. Scores of sensitive records are as secret as the records.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from privot.attacks.membership import gan_leaks, lira, loss, nearest, rmia, tracing


class MembershipAttack(NamedTuple):
    """A membership attack.

    Attributes:
        title: Name in reports.
        needs: What the attacker needs besides the candidates and their labels. ``model``: a
            classifier trained on the release. ``shadows``: models or sets of known members.
            ``population``: records that no model was trained on. ``set``: the released images.
            ``samples``: images that a generator gave. ``generator``: a generator to query.
            ``weights``: the weights of the generator. ``lpips``: the weights of LPIPS.
        function: The attack.
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
        "nearest released image in pixels", ("set",), nearest.score_nearest_distance
    ),
    "nearest-features": MembershipAttack(
        "nearest released image in random features",
        ("set",),
        partial(nearest.score_nearest_distance, metric="features"),
    ),
    "nearest-lpips": MembershipAttack(
        "nearest released image by LPIPS",
        ("set", "lpips"),
        partial(nearest.score_nearest_distance, metric="lpips"),
    ),
    "real-start": MembershipAttack(
        "largest cosine to a released image", ("set",), nearest.score_largest_cosine
    ),
    "tracing": MembershipAttack(
        "tracing by feature means", ("set", "population"), tracing.trace_members
    ),
    "gan-leaks-full": MembershipAttack(
        "GAN-Leaks, full black box", ("samples",), gan_leaks.score_full_black_box
    ),
    "gan-leaks-partial": MembershipAttack(
        "GAN-Leaks, partial black box", ("generator",), gan_leaks.score_partial_black_box
    ),
    "gan-leaks-white": MembershipAttack(
        "GAN-Leaks, white box", ("generator", "weights"), gan_leaks.score_white_box
    ),
}
