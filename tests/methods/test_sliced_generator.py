"""The sliced generator: the flow's answers at the flow's price, and a net that draws them."""

import pytest
import torch
from support.method_inputs import make_blobs, make_gate, make_rng, measure_agreement

from privot.components.transforms import build_image_transform
from privot.data.spec import Spec
from privot.methods.sliced_flow import SlicedFlow
from privot.methods.sliced_generator import SlicedGenerator
from privot.nets.generators.dense import scaled_dct_basis
from privot.runtime import Runtime, Streams, ignore_progress
from privot.transport.sliced import sliced_target_loss

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = Spec((1, 8, 8), 2, 400, (200, 200))
STREAMS = Streams(0, Runtime("cpu"))
LEARNING = {
    "noise_multiplier": 0.0,
    "num_frequencies": 8,
    "num_bases": 4,
    "patch_size": 3,
    "num_blocks": 10,
    "latent_dim": 6,
    "hidden_dim": 64,
    "batch_per_class": 40,
    "steps": 160,
    "learning_rate": 0.01,
}


@pytest.mark.parametrize("mode", ["blocks", "records"])
def test_it_asks_and_costs_what_the_flow_does(mode):
    generator, flow = (
        kind(noise_multiplier=2.0, moments_share=0.3, mode=mode)
        for kind in (SlicedGenerator, SlicedFlow)
    )
    plan = generator.plan(SPEC)
    assert plan == flow.plan(SPEC)
    key = "signal_to_noise_per_class"
    assert generator.forecast(SPEC, plan)[key] == flow.forecast(SPEC, plan)[key]


@pytest.mark.parametrize("mode", ["blocks", "records"])
def test_samples_follow_their_label_and_meet_the_quantiles(mode):
    method = SlicedGenerator(**LEARNING, mode=mode)
    gate = make_gate(method.plan(SPEC), *make_blobs(), SPEC)
    artifact = method.fit(gate, STREAMS, ignore_progress)
    assert not any(gate.count_remaining_queries(stage.name) for stage in gate.plan.stages)
    assert artifact.is_consistent_with(SPEC)
    samples, labels = artifact.sample(SPEC, 400)
    assert measure_agreement(samples, labels) > 0.95
    space = build_image_transform("cosines", (1, 8, 8), 8)
    images, marks = map(torch.from_numpy, make_blobs())
    for label in (0, 1):
        points = space.encode_image(samples[labels == label])
        real = space.encode_image(images[marks == label])
        targets = real.T.sort(1).values
        # what is left to go, beside a cloud that stands still at the mean
        left, still = (
            sliced_target_loss(cloud, torch.eye(64), targets)
            for cloud in (points, real.mean(0).expand_as(points))
        )
        assert left < 0.35 * still


def test_records_without_labels_are_met_all_together():
    method = SlicedGenerator(**LEARNING | {"steps": 100}, mode="records", labeled=False)
    gate = make_gate(method.plan(SPEC), *make_blobs(), SPEC)
    samples, _ = method.fit(gate, STREAMS, ignore_progress).sample(SPEC, 400)
    assert 0.3 < measure_agreement(samples, torch.ones(400)) < 0.7


def test_no_image_in_colour_is_left_black_and_white():
    """Hundreds of cosines of equal weights would saturate a fifth of all samples."""
    spec = Spec((3, 32, 32), 2, 200, (100, 100))
    basis = scaled_dct_basis(32, 12)
    decay = 1 + torch.arange(12)[:, None].square() + torch.arange(12).square()
    coarse = torch.randn(200, 3, 12, 12, generator=make_rng()) / decay
    images = (basis @ (0.8 * coarse) @ basis.T).sigmoid()
    method = SlicedGenerator(
        noise_multiplier=0.0, num_bases=4, batch_per_class=40, hidden_dim=128, steps=60
    )
    gate = make_gate(method.plan(spec), images, torch.arange(200) % 2, spec)
    samples, _ = method.fit(gate, STREAMS, ignore_progress).sample(spec, 400)
    assert samples.std() > 0.6 * images.std()
    for shown in (images, samples):
        saturated = ((shown < 0.01) | (shown > 0.99)).float().mean((1, 2, 3))
        assert saturated.max() < 0.1


def test_points_are_smoothed_as_much_as_the_records_were():
    method = SlicedGenerator(mode="records", noise_multiplier=3.0, num_frequencies=4, num_bases=2)
    gate = make_gate(method.plan(SPEC), *make_blobs(), SPEC)
    space = method.build_transform(SPEC)
    projections = method.query_projections(gate, space, STREAMS, ignore_progress)
    assert projections.targets.shape == (2, 16 + 2, 400)
    zeros = torch.zeros(4000, projections.frame.shape[1])
    points = projections.add_matching_noise(zeros, make_rng())
    spread = (projections.frame[0] @ points.mT).std(1).mean()
    # what the records themselves add to so much noise is small
    assert spread == pytest.approx(float(projections.targets[0].std(1).mean()), rel=0.1)
