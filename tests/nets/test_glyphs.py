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


def said(count=62, **words):
    codes = torch.zeros(count, 16)
    for word, value in words.items():
        codes[:, STYLE_FEATURES.index(word)] = value
    return codes


def drawn(**words):
    return render_glyphs(said(**words), torch.arange(62), SHAPE, 62)


def extent(images, along):
    return (images[:, 0].amax(3 - along) > 0.5).sum(1).float().mean()


def pictures(shape, classes, each):
    """Characters [classes, each, ...] in all hands."""
    codes = torch.randn(
        classes * each,
        len(STYLE_FEATURES) + NUM_BEND_FEATURES,
        generator=torch.Generator().manual_seed(0),
    )
    return render_glyphs(
        codes, torch.arange(classes).repeat_interleave(each), shape, classes
    ).unflatten(0, (classes, each))


def test_a_thick_bar_thins_to_a_line_in_its_middle():
    bar = np.zeros((1, 20, 20), bool)
    bar[0, 3:17, 8:13] = True
    [line] = _thin(bar)
    assert line.any()
    assert line.sum(1).max() <= 1
    assert set(np.flatnonzero(line.any(0))) <= {9, 10, 11}


def test_codes_say_how_it_is_written():
    assert drawn(pen=1.5).mean() > 1.2 * drawn(pen=-1.5).mean()
    assert extent(drawn(height=1.5), 1) > 1.3 * extent(drawn(height=-1.5), 1)
    assert extent(drawn(width=1.5), 2) > 1.2 * extent(drawn(width=-1.5), 2)
    rows = torch.arange(28.0).view(1, 1, 28, 1)
    middle = [(each * rows).sum() / each.sum() for each in (drawn(down=2.0), drawn(down=-2.0))]
    assert middle[0] > middle[1] + 1
    assert not torch.equal(drawn(hand=1.0), drawn(hand=-1.0))


def test_a_slant_leans_to_the_right():
    bar = drawn(slant=1.5)[ALPHABETS[62].index("I"), 0]
    top, low = (
        (bar[rows] * torch.arange(28)).sum() / bar[rows].sum()
        for rows in (slice(8, 14), slice(14, 20))
    )
    assert top > low + 1


def test_a_short_code_is_filled_with_zeros_and_a_long_one_cut():
    codes = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(5)
    longer = torch.cat([codes, torch.randn(5, 3)], 1)
    assert torch.equal(
        render_glyphs(codes, labels, SHAPE, 62), render_glyphs(longer, labels, SHAPE, 62)
    )
    assert torch.equal(
        render_glyphs(codes[:, :3], labels, SHAPE, 62),
        render_glyphs(codes * (torch.arange(16) < 3), labels, SHAPE, 62),
    )


def test_values_are_brightness_and_every_class_has_ink():
    images = pictures(SHAPE, 62, 8)
    assert images.min() >= 0
    assert images.max() <= 1
    assert (images.flatten(2).amax(2) > 0.5).float().mean() > 0.98


def read(real, classes, each=100):
    """The class of the drawn character that is most like each image, whatever their brightness."""
    known = pictures(tuple(real.shape[1:]), classes, each).flatten(0, 1)
    seen, known = (normalize(images.flatten(1), dim=1) for images in (real, known))
    return torch.cdist(seen, known).argmin(1) // each


def test_real_digits_are_read_by_their_likeness_to_drawn_ones():
    real = load_dataset("digits", "test", public=True).records()
    assert (read(real.images, 10) == real.labels).double().mean() > 0.4  # 0.52; by chance 0.1


def test_femnist_has_this_order(data_file):
    data_file("femnist")
    real = load_dataset("femnist", "test", public=True).records()
    some = torch.randperm(len(real.labels), generator=torch.Generator().manual_seed(0))[:1500]
    labels = real.labels[some]
    right = read(real.images[some], 62) == labels
    # By chance 0.02. Small letters would be lost if they came before capitals, and digits if they came last.
    assert right[labels < 10].double().mean() > 0.15
    assert right[labels >= 36].double().mean() > 0.25


def test_fonts_that_are_there_are_used_and_hands_differ():
    away = compute_glyph_distances(62)
    assert away.shape[1:] == (62, 64, 64)
    assert len(away) >= 2
    assert (away.flatten(2).amin(2) == 0).all()  # every character has a line
    assert not torch.equal(away[0], away[1])


def generator(seed=0):
    return initialize_weights(
        DcganGenerator((1, 8, 8), 10, latent_dim=16, channels=4),
        torch.Generator().manual_seed(seed),
    )


def test_a_generator_learns_to_draw_what_codes_say():
    net = generator()
    draws = torch.Generator().manual_seed(1)
    codes = torch.randn(200, 16, generator=draws)
    labels = torch.arange(200) % 10
    wanted = render_glyphs(codes, labels, (1, 8, 8), 10)
    pretrain_on_glyphs(net, 16, (1, 8, 8), 10, 80, 64, draws, learning_rate=0.02)
    found = net.eval()(codes, labels).detach()
    plain = (
        wanted.unflatten(0, (20, 10)).mean(0).repeat(20, 1, 1, 1)
    )  # each class as one picture, whatever the code
    assert (found - wanted).square().mean() < 0.9 * (plain - wanted).square().mean()


def test_a_start_is_repeated_by_its_seed_and_taken_up_after_a_crash(tmp_path):
    spec = Spec((1, 8, 8), 10)
    told = []
    first = pretrain_generator(
        generator(), "glyphs", 3, spec, Streams(5, run_folder=tmp_path)
    ).state_dict()
    again = pretrain_generator(
        generator(),
        "glyphs",
        3,
        spec,
        Streams(5, run_folder=tmp_path),
        lambda *step: told.append(step),
    ).state_dict()
    alike = pretrain_generator(generator(), "glyphs", 3, spec, Streams(5)).state_dict()
    other = pretrain_generator(generator(), "glyphs", 3, spec, Streams(6)).state_dict()
    assert told == []  # found as it was, not learned once more
    assert all(
        torch.equal(value, again[key]) and torch.equal(value, alike[key])
        for key, value in first.items()
    )
    assert not torch.equal(first["dense.weight"], other["dense.weight"])


def test_nothing_leaves_the_generator_as_it_is():
    net = pretrain_generator(generator(), "off", 3, Spec((1, 8, 8), 10), Streams(5))
    assert all(
        torch.equal(one, two)
        for one, two in zip(net.parameters(), generator().parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("start", "spec"),
    [("glyphs", Spec(SHAPE, 26)), ("glyphs", Spec((3, 32, 32), 10)), ("letters", Spec(SHAPE, 62))],
    ids=["26 classes", "colours", "unknown"],
)
def test_other_data_and_unknown_starts_are_refused(start, spec):
    with pytest.raises(SettingError, match="pretrain="):
        validate_pretrain("federated-gs-wgan", start, spec)
