"""Images drawn by code, images as sums of cosines, and steps that repeat."""

import gc
import weakref

import pytest
import torch

from privot.components.dct import LearnableImages, dct_basis
from privot.components.dead_leaves import generate_dead_leaves
from privot.nets.ensemble import Ensemble
from privot.nets.training import Recipe, train_ensemble
from privot.runtime import cuda_graphs
from privot.runtime.cuda_graphs import GraphedStep, disable_gc

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# Scenes


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 16, 16), (1, 12, 20)])
def test_scenes_are_images_in_order_of_their_kinds(shape):
    images, kinds = generate_dead_leaves(4, 30, shape, seeded(), CPU)
    assert images.shape == (120, *shape)
    assert kinds.tolist() == [number // 30 for number in range(120)]
    assert 0 <= images.min() < images.max() <= 1
    assert len(images.unique(dim=0)) == 120
    assert (images.std((1, 2, 3)) > 0.02).double().mean() > 0.9  # a blank image teaches nothing


def test_the_seed_draws_the_scenes_and_grey_is_the_mean_of_the_colours():
    one, same, other, grey = (
        generate_dead_leaves(3, 4, (channels, 16, 16), seeded(seed), CPU)[0]
        for seed, channels in ((1, 3), (1, 3), (2, 3), (1, 1))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    torch.testing.assert_close(grey, one.mean(1, keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_kinds_can_be_learned(channels):
    """From 80 images of each of four kinds a small net tells fresh ones apart; chance is a quarter."""
    images, kinds = generate_dead_leaves(4, 120, (channels, 16, 16), seeded(3), CPU)
    is_fresh = torch.arange(len(kinds)) % 3 == 0
    nets = Ensemble(1, (channels, 16, 16), 4, width=16, generator=seeded())
    recipe = Recipe(25, 0.02, batch_size=40, even_batches=True)
    train_ensemble(nets, images[~is_fresh], kinds[~is_fresh], recipe, seeded(1))
    with torch.no_grad():
        predicted = nets(2 * images[is_fresh] - 1)[0].argmax(1)
    assert (predicted == kinds[is_fresh]).double().mean() > 0.6


# Cosines


def show(images, detail=0.5):
    return LearnableImages(images, detail).to_images().detach()


@pytest.mark.parametrize("side", [1, 2, 7, 8, 32])
def test_cosines_are_orthonormal_and_the_first_is_flat(side):
    basis = dct_basis(side, side)
    torch.testing.assert_close(basis.T @ basis, torch.eye(side), rtol=0, atol=1e-5)
    torch.testing.assert_close(basis[:, 0], torch.full((side,), side**-0.5))


def test_images_of_half_the_frequencies_are_the_nearest():
    """What remains is orthogonal to every image of these frequencies."""
    images = torch.rand(3, 2, 8, 12, generator=seeded())
    assert LearnableImages(images, 0.5).learnable.shape == (3, 2, 4, 6)
    smooth = show(images)
    rest = images - smooth
    assert rest.norm() > 0.3
    for seed in range(5):
        other = show(torch.rand(3, 2, 8, 12, generator=seeded(seed + 1)))
        assert abs((rest * other).sum().item()) < 1e-3
    torch.testing.assert_close(show(smooth), smooth, rtol=0, atol=1e-5)


def test_smooth_images_stay_and_a_checkerboard_goes():
    smooth = torch.linspace(0, 1, 16).expand(1, 1, 16, 16)
    sign = (-1.0) ** (torch.arange(16)[:, None] + torch.arange(16))
    checks = (0.5 + 0.5 * sign).expand(1, 1, 16, 16)
    torch.testing.assert_close(show(smooth), smooth, rtol=0, atol=0.02)
    assert (show(checks) - 0.5).abs().mean() < 0.15 * (checks - 0.5).abs().mean()


@pytest.mark.parametrize("detail", [0.01, 0.5, 1.0])
def test_what_an_optimiser_moves_is_what_is_shown(detail):
    images = torch.rand(2, 1, 8, 8, generator=seeded())
    canvas = LearnableImages(images, detail)
    assert canvas.learnable.is_leaf
    value = (canvas.to_images() * images).sum()
    (gradient,) = torch.autograd.grad(value, canvas.learnable)
    torch.testing.assert_close((gradient * canvas.learnable).sum(), value)  # it is linear
    with torch.no_grad():
        canvas.learnable.add_(5)
    canvas.clamp_pixels()
    # Frequencies may leave [0, 1], pixels may not.
    assert (canvas.to_images().max().item() > 1) == (detail < 1)
    assert images.max() <= 1  # a copy was moved


# Steps that repeat


def test_every_call_is_one_step():
    total = torch.zeros(())
    step = GraphedStep(lambda: total.add_(1), CPU)
    calls = cuda_graphs.WARMUP_CALLS + 4
    for _ in range(calls):
        step()
    assert (total.item(), step.num_runs) == (calls, calls)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: a step is captured on one alone"
)
def test_a_captured_step_counts_reads_its_buffers_and_draws_on():
    device = torch.device("cuda")
    total, added = (torch.zeros((), device=device) for _ in range(2))
    numbers = torch.zeros(4, device=device)
    rng = torch.Generator(device).manual_seed(0)
    calls = []

    def step():
        calls.append(1)
        total.add_(added)
        numbers.uniform_(generator=rng)

    graphed = GraphedStep(step, device, rng)
    seen = set()
    for turn in range(10):
        added.fill_(turn)
        graphed()
        seen.add(tuple(numbers.tolist()))
    assert total.item() == sum(range(10))
    assert len(calls) == cuda_graphs.WARMUP_CALLS + 1  # with the capture; the rest is replayed
    assert len(seen) == 10


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_collected_before_a_capture_and_not_inside(is_enabled):
    class Cycle:
        def __init__(self):
            self.itself = self
            weakref.finalize(self, collected.append, "gone")

    collected = []
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        Cycle()
        second = Cycle()
        (gc.enable if is_enabled else gc.disable)()
        with disable_gc():
            assert collected == ["gone"]  # what nobody held
            del second
            for _ in range(3):
                _ = [[number] for number in range(20_000)]  # enough to make a collection due
            assert collected == ["gone"]
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
