"""Convolutions of many networks side by side are torch's, and so are all their derivatives, one by one and under vmap."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch.func import grad, vmap
from torch.nn.functional import conv2d

from privot.components import sharded_critics
from privot.nets import functional_critic as networks
from privot.nets.functional_critic import Critic, Sketch
from privot.nets.vmap_conv import ToInput, ToOutput, ToWeights, by_faces, convolve

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_on_a_cpu_it_is_torch_s_to_the_bit():
    x = drawn(2, 3, 6, 5).float()
    w = drawn(4, 3, 5, 5, seed=1).float()
    b = drawn(4, seed=2).float()
    assert torch.equal(convolve(x, w, b, 2, 2), conv2d(x, w, b, 2, 2))


@pytest.mark.parametrize(
    ("side", "stride", "padding"), [(5, 2, 2), (3, 1, 1), (4, 3, 1), (1, 2, 0)]
)
def test_the_faces_are_those_of_each_network_alone(side, stride, padding):
    x = drawn(3, 2, 2, 6, 5)
    w = drawn(3, 4, 2, side, side, seed=1)
    y = ToOutput.apply(x, w, stride, padding)
    dy = drawn(*y.shape, seed=2)
    faces = (
        y,
        ToInput.apply(dy, w, 6, 5, stride, padding),
        ToWeights.apply(x, dy, side, stride, padding),
    )
    for place in range(3):
        one = x[place].clone().requires_grad_()
        weight = w[place].clone().requires_grad_()
        plain = conv2d(one, weight, None, stride, padding)
        wanted = plain, *torch.autograd.grad((plain * dy[place]).sum(), (one, weight))
        for found, each in zip(faces, wanted, strict=True):
            near(found[place], each)


@pytest.mark.parametrize("face", [ToOutput, ToInput, ToWeights])
def test_every_face_has_right_slopes_twice(face):
    x = drawn(2, 1, 2, 4, 3)
    w = drawn(2, 2, 2, 3, 3, seed=1)
    dy = drawn(2, 1, 2, 2, 2, seed=2)
    given, more = {ToOutput: ((x, w), ()), ToInput: ((dy, w), (4, 3)), ToWeights: ((x, dy), (3,))}[
        face
    ]
    given = [each.requires_grad_() for each in given]
    assert torch.autograd.gradcheck(lambda *some: face.apply(*some, *more, 2, 1), given)
    assert torch.autograd.gradgradcheck(lambda *some: face.apply(*some, *more, 2, 1), given)


@pytest.mark.parametrize("dims", [(0, 0), (2, 1), (0, None), (1, None), (None, 0), (None, 2)])
@pytest.mark.parametrize("face", [ToOutput, ToInput, ToWeights])
def test_under_vmap_it_is_each_alone(face, dims):
    shapes = {"x": (2, 3, 2, 4, 5), "w": (2, 4, 2, 3, 3), "dy": (2, 3, 4, 2, 3)}
    names, more = {
        ToOutput: ("xw", ()),
        ToInput: (("dy", "w"), (4, 5)),
        ToWeights: (("x", "dy"), (3,)),
    }[face]
    whole = [
        drawn(*(() if at is None else (3,)), *shapes[name], seed=place)
        for place, (name, at) in enumerate(zip(names, dims, strict=True))
    ]
    given = [
        each if at is None else each.movedim(0, at) for each, at in zip(whole, dims, strict=True)
    ]
    found = vmap(lambda *some: face.apply(*some, *more, 2, 1), in_dims=dims)(*given)
    for place in range(3):
        near(
            found[place],
            face.apply(
                *(
                    each if at is None else each[place]
                    for each, at in zip(whole, dims, strict=True)
                ),
                *more,
                2,
                1,
            ),
        )


def shard(count=3, width=3, shape=(2, 9, 8), batch=4):
    """The same things that a gate would give: critics, sketches and states in double precision."""
    critic = Critic(shape, 3, width)
    sketch = Sketch(shape, 3, width=2)
    weights, along = (
        each.double() for each in critic.begin(count, torch.Generator().manual_seed(0))
    )
    weights = weights + 0.1 * drawn(*weights.shape)
    drafts = sketch.begin(count, torch.Generator().manual_seed(1)).double()
    state = {"weights": weights, "mean": 0 * weights, "square": 0 * weights, "along": along}
    state |= {"sketch": drafts, "sketch mean": 0 * drafts, "sketch square": 0 * drafts}
    images = drawn(count, 5, *shape, seed=3).sigmoid()
    labels = torch.arange(5 * count).view(count, 5) % 3
    codes = drawn(2, batch, sketch.code, seed=4)
    mix = drawn(2, batch, seed=5).sigmoid()
    given = (critic, sketch, drawn(2, batch, seed=6).sigmoid(), codes, mix, torch.tensor(0.0), 1e-3)
    return images, labels, state, given


def both_ways(monkeypatch, run):
    """Torch's own convolutions, and the faces."""
    plain = run()
    monkeypatch.setattr(networks, "convolve", by_faces)
    return run(), plain


def test_critics_and_sketches_learn_the_same_through_the_faces(monkeypatch):
    """A slope of a slope, under vmap."""
    images, labels, state, given = shard()
    each = vmap(sharded_critics.warmed, in_dims=(0, 0, 0, *(None for _ in given)))
    found, wanted = both_ways(monkeypatch, lambda: each(images, labels, state, *given))
    for name, value in wanted.items():
        near(found[name], value)
        assert not torch.equal(value, state[name])


def test_slopes_of_many_images_by_many_critics(monkeypatch):
    """Nested vmaps: the inner one shares its critic's weights."""
    _, _, state, (critic, *_) = shard()
    images = drawn(4, 2, 9, 8, seed=7).sigmoid()
    labels = torch.arange(4) % 3
    how = {"critic": critic, "down": drawn(9, 3, seed=8), "across": drawn(8, 2, seed=9)}
    each = vmap(
        lambda one: sharded_critics.clipped_slopes(one, images, labels, **how), chunk_size=2
    )
    found, wanted = both_ways(monkeypatch, lambda: each(state))
    near(found, wanted)


def test_one_critic_alone(monkeypatch):
    images, labels, state, (critic, _, _, _, mix, *_) = shard(count=1)
    given = state["along"][0], images[0, :4], images[0, 1:], labels[0, :4], mix[0]
    found, wanted = both_ways(monkeypatch, lambda: grad(critic.loss)(state["weights"][0], *given))
    near(found, wanted)


INTERPRETED = """
import torch
from torch.func import grad, vmap
from privot.nets import critic as networks, fused_convolution as fused, side_by_side as plain
from privot.nets.fused_adam import Adam

def near(found, wanted):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max(), (found - wanted).abs().max() / wanted.abs().max()

cases = ((2, 8, 1, 6, 32, 5, 2, 2), (2, 1, 64, 3, 64, 3, 2, 1), (2, 1, 32, 2, 160, 3, 2, 1), (2, 3, 3, 9, 20, 5, 2, 2),
    (2, 1, 32, 6, 16, 3, 1, 1), (2, 2, 16, 7, 1, 3, 1, 1), (2, 2, 2, 1, 3, 5, 2, 2), (2, 2, 2, 6, 3, 1, 2, 0), (2, 1, 3, 7, 4, 4, 3, 1))
fused.LONG = 8
for nets, n, channels, height, outs, side, *how in cases:
    x, w = torch.randn(nets, n, channels, height, height + 1), torch.randn(nets, outs, channels, side, side)
    y = plain.ToOutput.apply(x, w, *how)
    dy, size = torch.randn_like(y), (height, height + 1)
    wanted = y, plain.ToInput.apply(dy, w, *size, *how), plain.ToWeights.apply(x, dy, side, *how)
    among = fused.to_output(x, w, *how), fused.to_input(dy, w, *size, *how), fused.to_weights(x, dy, side, *how)
    for found, each in zip(among, wanted):
        near(found, each)
    x, w, dy = (each[1:] for each in (x, w, dy))
    alone = fused.to_output(x, w, *how), fused.to_input(dy, w, *size, *how), fused.to_weights(x, dy, side, *how)
    assert all(torch.equal(one[0], many[1]) for one, many in zip(alone, among))
    fused.TURN = 8 - fused.TURN
    near(fused.to_input(dy, w, *size, *how)[0], wanted[1][1])
    shared, w = x.expand(3, *x.shape[1:]), torch.randn(3, outs, channels, side, side)
near(fused.to_output(shared, w, *how), plain.ToOutput.apply(shared, w, *how))

given, age = torch.randn(4, 3, 700), torch.tensor(3.0)
given[3] **= 2
wanted = networks.adam(*given, age, 0.01)
found = vmap(lambda *one: Adam.apply(*one, 1 - 0.5**age, 1 - 0.9**age, 0.01))(*given)
assert all(torch.allclose(one, two, rtol=1e-5, atol=1e-6) for one, two in zip(found, wanted))

critic = networks.Critic((1, 8, 8), 3, 16)
weights, along = critic.begin(2, torch.Generator().manual_seed(0))
weights += 0.1 * torch.randn(weights.shape)
given = weights, along, torch.rand(2, 3, 1, 8, 8), torch.rand(2, 3, 1, 8, 8), torch.randint(3, (2, 3)), torch.rand(2, 3)
wanted = vmap(grad(critic.loss))(*given)
networks.convolve, plain._kernels = plain.by_faces, lambda *_: fused
near(vmap(grad(critic.loss))(*given), wanted)
print("right")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here to interpret the kernels")
def test_the_kernels_are_right_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.stdout == "right\n", done.stderr
