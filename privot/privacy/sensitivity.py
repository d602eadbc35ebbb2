"""The only table of sensitivities in the package, and the samplers that its bounds hold for."""

from __future__ import annotations

from privot.errors import PlanError
from privot.privacy.plan import Plan
from privot.privacy.sampling import ADD_REMOVE, CLIENT, LOCAL, REPLACE, Fixed, Full, Poisson, Shards

# privacy: the L2 distance by which one neighbour can move a query result before noise, in units of
# its clip norm. A pair that is missing has no argument and is refused. The arguments are in
# docs/methods/gate.md and, for channels, in docs/methods/channels.md.
SENSITIVITY = {
    # One value of norm at most C is added or removed.
    ("sum", ADD_REMOVE): 1.0,
    # One value is replaced by another.
    ("sum", REPLACE): 2.0,
    # One row changes. Under add/remove the number of rows would be a query result itself.
    ("rows", REPLACE): 2.0,
    ("rows", LOCAL): 2.0,
    # The value may change completely, within the ball of radius C.
    ("query_sample", ADD_REMOVE): 2.0,
    ("query_sample", REPLACE): 2.0,
    # Sorting telescopes.
    ("sorted_blocks", REPLACE): 2.0,
    # The state of one shard, and so its value, may change completely, within the ball.
    ("query_random_shards", REPLACE): 2.0,
    # The value of one shard is replaced by another.
    ("sum_over_shards", REPLACE): 2.0,
    ("sum_over_shards", CLIENT): 2.0,
    # A row is the value of one shard of its client. The rows of other clients do not change.
    ("query_clients", REPLACE): 2.0,
    # All rows of one client may change, each within the ball. They compose.
    ("query_clients", CLIENT): 2.0,
    # The noise of a channel is scaled to its own domain.
    ("privatize", LOCAL): 1.0,
}
# privacy: the samplers for which the same distance also holds between a sample with the changed
# record and one without it, as privacy amplification needs. Sums over two different shards are far
# apart, and so are rows that move up by one. A sampler without a proof is refused.
PROVEN_SAMPLERS: dict[str, tuple[type, ...]] = {
    "sum": (Full, Poisson, Fixed),
    "rows": (Full,),
    "query_sample": (Full, Poisson, Fixed),
    "sorted_blocks": (Full,),
    "query_random_shards": (Shards,),
    "sum_over_shards": (Full,),
    "query_clients": (Full, Shards),
    "privatize": (Full,),
}


def require_proof(plan: Plan) -> None:
    """Check that every stage of a plan has a privacy argument.

    Raises:
        PlanError: If a combination of operation, neighbours, sampler and mechanism has none.
    """
    for stage in plan.stages:
        # Only channels add noise that is not Gaussian.
        has_unproven_noise = stage.mechanism != "gaussian" and stage.operation != "privatize"
        if (
            has_unproven_noise
            or (stage.operation, plan.neighbours) not in SENSITIVITY
            or type(stage.sampling) not in PROVEN_SAMPLERS[stage.operation]
        ):
            raise PlanError(
                f"Stage {stage.name}: {stage.operation} with {type(stage.sampling).__name__} "
                f"sampling has no proof under {plan.neighbours} neighbours."
            )
