"""Sinkhorn, sliced and entropic transport."""

import torch
from golden.core import golden
from golden.inputs import normal, rng, uniform

from privot.transport import entropic, sinkhorn, sliced, sliced_distance, sorting
from privot.transport.anderson import AndersonAcceleration
from privot.transport.costs import l1_cost
from privot.transport.sinkhorn_iterations import LogIteration


@golden("transport/sinkhorn")
def run_sinkhorn(folder):
    x = uniform(2, 7, 3, seed=1).requires_grad_()
    y = uniform(2, 5, 3, seed=2)
    weights = uniform(7, seed=3) + 0.1
    a = weights / weights.sum()
    cost = sinkhorn.squared_euclidean_cost(x, y, l1_weight=0.3)
    loss = sinkhorn.entropic_transport_cost(cost, 0.05, a=a, num_iterations=15)
    divergence = sinkhorn.sinkhorn_divergence(x, y, 0.1, num_iterations=10)
    more = {"l1_weight": 0.2, "num_iterations": 10}
    half = sinkhorn.semi_debiased_loss(x, x.roll(1, 1), y, 0.1, **more)
    yield "cost", cost
    yield "potentials", list(sinkhorn.solve_potentials(cost, 0.05, num_iterations=12))
    yield "plan", sinkhorn.transport_plan(cost, 0.05, num_iterations=12)
    yield "losses", [loss, divergence, half]
    yield "slope", torch.autograd.grad((loss + divergence + half).sum(), x)[0]
    yield "even", sinkhorn.uniform_weights(cost, -1)


@golden("transport/entropic")
def run_entropic(folder):
    radii = (0.5, 2.0, 10.0, 300.0)
    yield "sweeps", [entropic.count_sufficient_iterations(radius) for radius in radii]
    for scale in (1.0, 30.0):
        x = normal(9, 20, seed=4).requires_grad_()
        y = scale * normal(11, 20, seed=5)
        cost = l1_cost(x, y)
        for count in (None, 12):
            run = entropic.solve_sinkhorn(cost, 2.0, count)
            values = [run.f, run.g, run.marginal_error, run.num_iterations]
            yield f"settled {scale} {count}", values
        losses = [entropic.entropic_loss(cost, 2.0), entropic.likelihood_loss(cost, 2.0)]
        yield f"losses {scale}", losses
        gradients = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]
        yield f"slopes {scale}", gradients
    yield "logarithms", list(LogIteration(cost.detach() / 2).run(torch.zeros(11), 6))


@golden("transport/sliced")
def run_sliced(folder):
    frame = sliced.random_orthogonal_frames(4, 3, rng(0))
    x = normal(8, 4, seed=1).requires_grad_()
    y = normal(6, 4, seed=2)
    targets = normal(12, 5, seed=3).sort(1).values
    losses = [
        sliced_distance.sliced_wasserstein_distance(x, y, frame),
        sliced_distance.sliced_wasserstein_distance(x, y, frame, p=1),
        sliced_distance.max_sliced_wasserstein_distance(x, y, frame),
        sliced.sliced_target_loss(x, frame, targets),
        sliced.sliced_target_loss(x, frame, targets, p=3, bits=16),
    ]
    points = x.detach()
    many = (points.expand(2, 8, 4), frame, targets.expand(2, 12, 5), 0.5)
    rows = normal(12, 8, seed=4)
    yield "frame", frame
    yield "stretched", [sliced.resample_quantiles(targets, count) for count in (1, 5, 9)]
    yield "assigned", [sliced.slice_targets(rows, targets, bits) for bits in (16, 32)]
    rates = (0.3, 1.0)
    yield "steps", [sliced.sliced_flow_step(points, frame, targets, rate) for rate in rates]
    yield "measured", list(sliced.sliced_flow_step_with_error(*many))
    yield "losses", losses
    yield "slopes", [torch.autograd.grad(loss, x)[0] for loss in losses]
    yield "slices", sliced_distance.slice_distances(points, y, frame, 2)


@golden("transport/sorting")
def run_sorting(folder):
    values = normal(5, 40, seed=0).requires_grad_()
    ordered = sorting.sort_rows(values)
    plain = values.detach()
    calls = ((plain,), (plain, 16), (plain.double(),))
    yield "ranks", [sorting.argsort_rows(*call) for call in calls]
    yield "coarse", sorting.quantize_keys(plain)
    yield "packed", sorting.sort_packed_keys(plain)
    yield "ordered", [ordered, sorting.sort_rows(plain)]
    yield "slope", torch.autograd.grad((ordered * torch.arange(40)).sum(), values)[0]
    yield "monotone", sorting.isotonic_regression(plain)


@golden("transport/absolute")
def run_l1_cost(folder):
    for dim in (3, 40):
        x = normal(6, dim, seed=1).requires_grad_()
        y = (3 * normal(7, dim, seed=2)).requires_grad_()
        cost = l1_cost(x, y)
        weights = uniform(6, 7, seed=3)
        yield f"{dim}", [cost, *torch.autograd.grad((cost * weights).sum(), (x, y))]
    yield "batches", l1_cost(uniform(2, 3, 4, seed=5), uniform(2, 5, 4, seed=6))


@golden("transport/extrapolation")
def run_extrapolation(folder):
    x = uniform(6, seed=1)
    factors = 0.3 + 0.6 * uniform(6, seed=2)
    acceleration = AndersonAcceleration(x)
    heads = []
    for _ in range(5):
        y = factors * x + 0.1
        acceleration.record(x, y, y.sum())
        heads.append(acceleration.extrapolate())
        x = y
    return {"heads": heads}
