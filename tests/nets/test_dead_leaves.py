"""Pictures drawn by code, images as sums of cosines, and steps that repeat."""

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
    assert kinds.tolist() == [place // 30 for place in range(120)]
    assert 0 <= images.min() < images.max() <= 1
    assert len(images.unique(dim=0)) == 120
    assert (images.std((1, 2, 3)) > 0.02).double().mean() > 0.9  # a blank picture teaches nothing


def test_the_seed_draws_the_scenes():
    one, same, other = (
        generate_dead_leaves(3, 4, (3, 16, 16), seeded(seed), CPU)[0] for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_grey_scene_is_the_mean_of_its_colours():
    colour, grey = (
        generate_dead_leaves(2, 3, (channels, 16, 16), seeded(), CPU)[0] for channels in (3, 1)
    )
    torch.testing.assert_close(grey, colour.mean(1, keepdim=True))


@pytest.mark.parametrize("channels", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kinds_can_be_learned(channels):
    """From 80 pictures of each of four kinds a small net tells fresh ones apart; chance is a quarter."""
    images, kinds = generate_dead_leaves(4, 120, (channels, 16, 16), seeded(3), CPU)
    fresh = torch.arange(len(kinds)) % 3 == 0
    nets = Ensemble(1, (channels, 16, 16), 4, width=16, generator=seeded())
    train_ensemble(
        nets,
        images[~fresh],
        kinds[~fresh],
        Recipe(25, 0.02, batch_size=40, even_batches=True),
        seeded(1),
    )
    with torch.no_grad():
        right = (nets(2 * images[fresh] - 1)[0].argmax(1) == kinds[fresh]).double().mean()
    assert right > 0.6


# Waves


@pytest.mark.parametrize("side", [1, 2, 7, 8, 32])
def test_cosines_are_orthonormal_and_the_first_is_flat(side):
    waves = dct_basis(side, side)
    torch.testing.assert_close(waves.T @ waves, torch.eye(side), rtol=0, atol=1e-5)
    torch.testing.assert_close(waves[:, 0], torch.full((side,), side**-0.5))


def test_a_canvas_of_half_the_frequencies_is_the_nearest_there_is():
    """What remains is orthogonal to every image that the canvas can show."""
    images = torch.rand(3, 2, 8, 12, generator=seeded())
    canvas = LearnableImages(images, 0.5)
    assert canvas.learnable.shape == (3, 2, 4, 6)
    left = images - canvas.to_images().detach()
    assert left.norm() > 0.3
    for seed in range(5):
        other = (
            LearnableImages(torch.rand(3, 2, 8, 12, generator=seeded(seed + 1)), 0.5)
            .to_images()
            .detach()
        )
        assert abs((left * other).sum().item()) < 1e-3
    torch.testing.assert_close(
        LearnableImages(canvas.to_images(), 0.5).to_images(), canvas.to_images(), rtol=0, atol=1e-5
    )


def test_smooth_images_keep_and_a_checkerboard_goes():
    smooth = torch.linspace(0, 1, 16).expand(1, 1, 16, 16)
    checks = 0.5 + 0.5 * (-1.0) ** (torch.arange(16)[:, None] + torch.arange(16)).expand(
        1, 1, 16, 16
    )
    torch.testing.assert_close(
        LearnableImages(smooth, 0.5).to_images().detach(), smooth, rtol=0, atol=0.02
    )
    shown = LearnableImages(checks, 0.5).to_images().detach()
    assert (shown - 0.5).abs().mean() < 0.15 * (checks - 0.5).abs().mean()


@pytest.mark.parametrize("detail", [0.01, 0.5, 1.0])
def test_what_an_optimiser_moves_is_what_is_shown(detail):
    images = torch.rand(2, 1, 8, 8, generator=seeded())
    canvas = LearnableImages(images, detail)
    assert canvas.learnable.is_leaf
    (slope,) = torch.autograd.grad((canvas.to_images() * images).sum(), canvas.learnable)
    torch.testing.assert_close(
        (slope * canvas.learnable).sum(), (canvas.to_images() * images).sum()
    )  # linear, so its slope says all of it
    with torch.no_grad():
        canvas.learnable.add_(5)
    canvas.clamp_pixels()
    assert (canvas.to_images().max().item() > 1) == (
        detail < 1
    )  # frequencies may leave [0, 1], pixels may not
    assert images.max() <= 1  # a copy was moved


# Steps that repeat


def test_every_call_is_one_step():
    total = torch.zeros(())
    again = GraphedStep(lambda: total.add_(1), CPU)
    for _ in range(cuda_graphs.WARMUP_CALLS + 4):
        again()
    assert (total.item(), again.num_runs) == (
        cuda_graphs.WARMUP_CALLS + 4,
        cuda_graphs.WARMUP_CALLS + 4,
    )


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: a step is captured on one alone"
)
def test_a_captured_step_counts_reads_its_buffers_and_draws_on():
    device = torch.device("cuda")
    total = torch.zeros((), device=device)
    added = torch.zeros((), device=device)
    drawn = torch.zeros(4, device=device)
    source = torch.Generator(device).manual_seed(0)
    calls = []

    def step():
        calls.append(1)
        total.add_(added)
        drawn.uniform_(generator=source)

    again = GraphedStep(step, device, source)
    seen = set()
    for turn in range(10):
        added.fill_(turn)
        again()
        seen.add(tuple(drawn.tolist()))
    assert total.item() == sum(range(10))
    assert (
        len(calls) == cuda_graphs.WARMUP_CALLS + 1
    )  # eager ones and the capture; what follows is replayed
    assert len(seen) == 10


@pytest.mark.parametrize("before", [True, False])
def test_rubbish_is_collected_before_a_capture_and_not_inside(before):
    class Old:
        pass

    was = gc.isenabled()
    seen = []
    try:
        gc.disable()
        first = Old()
        second = Old()
        for each in (first, second):
            each.itself = each
            weakref.finalize(each, seen.append, "gone")
        del each, first
        (gc.enable if before else gc.disable)()
        with disable_gc():
            assert seen == ["gone"]  # what nobody held
            del second
            for _ in range(3):
                _ = [[place] for place in range(20_000)]  # enough to make a collection due
            assert seen == ["gone"]
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()
