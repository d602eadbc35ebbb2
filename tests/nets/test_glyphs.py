"""Characters drawn by code: a code means what it says, classes come in the data's order, and a generator can learn to draw them."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from privot.components.glyphs import (
    ALPHABETS,
    NUM_BEND_FEATURES,
    STYLE_FEATURES,
    _thin,
    compute_glyph_distances,
    pretrain_on_glyphs,
    render_glyphs,
)
from privot.components.pretraining import pretrain_generator, validate_pretrain
from privot.data import load_dataset
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import DcganGenerator, initialize_weights
from privot.runtime import Streams

SHAPE = (1, 28, 28)


def render(**style):
    codes = torch.zeros(62, 16)
    for feature, value in style.items():
        codes[:, STYLE_FEATURES.index(feature)] = value
    return render_glyphs(codes, torch.arange(62), SHAPE, 62)


def compute_extent(images, axis):
    return (images[:, 0].amax(3 - axis) > 0.5).sum(1).float().mean()


def render_classes(shape, classes, count):
    """Characters [classes, count, ...] in all hands."""
    generator = torch.Generator().manual_seed(0)
    num_features = len(STYLE_FEATURES) + NUM_BEND_FEATURES
    codes = torch.randn(classes * count, num_features, generator=generator)
    labels = torch.arange(classes).repeat_interleave(count)
    return render_glyphs(codes, labels, shape, classes).unflatten(0, (classes, count))


def test_a_thick_bar_thins_to_a_line_in_its_middle():
    bar = np.zeros((1, 20, 20), bool)
    bar[0, 3:17, 8:13] = True
    [line] = _thin(bar)
    assert line.any()
    assert line.sum(1).max() <= 1
    assert set(np.flatnonzero(line.any(0))) <= {9, 10, 11}


def test_codes_say_how_it_is_written():
    assert render(pen=1.5).mean() > 1.2 * render(pen=-1.5).mean()
    for feature, axis, factor in (("height", 1, 1.3), ("width", 2, 1.2)):
        large, small = (compute_extent(render(**{feature: value}), axis) for value in (1.5, -1.5))
        assert large > factor * small
    rows = torch.arange(28.0).view(1, 1, 28, 1)
    low, high = (
        (image * rows).sum() / image.sum() for image in (render(down=2.0), render(down=-2.0))
    )
    assert low > high + 1
    assert not torch.equal(render(hand=1.0), render(hand=-1.0))
    bar = render(slant=1.5)[ALPHABETS[62].index("I"), 0]  # leans to the right
    upper, lower = (
        (bar[rows] * torch.arange(28)).sum() / bar[rows].sum()
        for rows in (slice(8, 14), slice(14, 20))
    )
    assert upper > lower + 1


def test_a_short_code_is_filled_with_zeros_and_a_long_one_cut():
    codes = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(5)
    longer = torch.cat([codes, torch.randn(5, 3)], 1)
    for one, two in ((codes, longer), (codes[:, :3], codes * (torch.arange(16) < 3))):
        images, same = (render_glyphs(given, labels, SHAPE, 62) for given in (one, two))
        assert torch.equal(images, same)


def test_values_are_brightness_and_every_class_has_ink():
    images = render_classes(SHAPE, 62, 8)
    assert 0 <= images.min() <= images.max() <= 1
    assert (images.flatten(2).amax(2) > 0.5).float().mean() > 0.98


def classify(images, classes, count=100):
    """The class of the rendered character that is most like each image, whatever their brightness."""
    rendered = render_classes(tuple(images.shape[1:]), classes, count).flatten(0, 1)
    one, two = (normalize(batch.flatten(1), dim=1) for batch in (images, rendered))
    return torch.cdist(one, two).argmin(1) // count


def test_real_digits_are_classified_by_their_likeness_to_rendered_ones():
    real = load_dataset("digits", "test", public=True).records()
    accuracy = (classify(real.images, 10) == real.labels).double().mean()
    assert accuracy > 0.4  # 0.52; by chance 0.1


def test_femnist_has_this_order(data_file):
    data_file("femnist")
    real = load_dataset("femnist", "test", public=True).records()
    some = torch.randperm(len(real.labels), generator=torch.Generator().manual_seed(0))[:1500]
    labels = real.labels[some]
    is_right = classify(real.images[some], 62) == labels
    # By chance 0.02. Small letters would be lost if they came before capitals, and digits if they came last.
    assert is_right[labels < 10].double().mean() > 0.15
    assert is_right[labels >= 36].double().mean() > 0.25


def test_available_fonts_are_used_and_hands_differ():
    distances = compute_glyph_distances(62)
    assert distances.shape[1:] == (62, 64, 64)
    assert len(distances) >= 2
    assert (distances.flatten(2).amin(2) == 0).all()  # every character has a line
    assert not torch.equal(distances[0], distances[1])


def make_generator():
    net = DcganGenerator((1, 8, 8), 10, latent_dim=16, channels=4)
    return initialize_weights(net, torch.Generator().manual_seed(0))


def test_a_generator_learns_to_draw_what_codes_say():
    net = make_generator()
    rng = torch.Generator().manual_seed(1)
    codes = torch.randn(200, 16, generator=rng)
    labels = torch.arange(200) % 10
    glyphs = render_glyphs(codes, labels, (1, 8, 8), 10)
    pretrain_on_glyphs(net, 16, (1, 8, 8), 10, 80, 64, rng, learning_rate=0.02)
    images = net.eval()(codes, labels).detach()
    means = glyphs.unflatten(0, (20, 10)).mean(0).repeat(20, 1, 1, 1)  # whatever the code
    assert (images - glyphs).square().mean() < 0.9 * (means - glyphs).square().mean()


def test_a_start_is_repeated_by_its_seed_and_resumed_after_a_crash(tmp_path):
    spec = Spec((1, 8, 8), 10)
    steps = []

    def pretrain(seed, start="glyphs", folder=None, *progress):
        streams = Streams(seed, run_folder=folder)
        net = pretrain_generator(make_generator(), start, 3, spec, streams, *progress)
        return net.state_dict()

    first = pretrain(5, "glyphs", tmp_path)
    again = pretrain(5, "glyphs", tmp_path, lambda *step: steps.append(step))
    assert steps == []  # loaded, not learned once more
    for state in (again, pretrain(5)):
        assert all(torch.equal(value, state[key]) for key, value in first.items())
    assert not torch.equal(first["dense.weight"], pretrain(6)["dense.weight"])
    unchanged = make_generator().state_dict()
    state = pretrain(5, "off")
    assert all(torch.equal(value, state[key]) for key, value in unchanged.items())


@pytest.mark.parametrize(
    ("start", "spec"),
    [("glyphs", Spec(SHAPE, 26)), ("glyphs", Spec((3, 32, 32), 10)), ("letters", Spec(SHAPE, 62))],
    ids=["26 classes", "colours", "unknown"],
)
def test_other_data_and_unknown_starts_are_refused(start, spec):
    with pytest.raises(SettingError, match="pretrain="):
        validate_pretrain("federated-gs-wgan", start, spec)
