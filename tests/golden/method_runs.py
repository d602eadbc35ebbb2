"""Releases of every method, and of methods with other settings."""

import numpy as np
import torch
from golden.core import CPU, golden, numbers, tensors_of
from golden.inputs import coarse_accounting, sensitive_digits, uniform
from support import tiny_settings
from support.factories import make_release

from privot.data.spec import Spec
from privot.local.dataset import PrivatizedDataset
from privot.local.schema import parse_table_channel
from privot.methods import list_methods, make_method
from privot.privacy.noise import SecretRandom
from privot.release import Release, export
from privot.release.verify import verify
from privot.runtime.preview import render_image_grid
from privot.synthesis import resize, synthesize
from privot.synthesis.cost import configure_method, find_shorter_run, predict_cpu_seconds

# label of a run, which begins with the name of the method -> settings beside the tiny ones
VARIANTS = {
    "distribution-matching-real": {"init": "real", "augment": False, "ratio": 0.1},
    "dp-sinkhorn-batch": {"clip_unit": "batch", "l1_weight": 0.5, "fresh_fraction": 0.5},
    "entropic-gan-nll": {"loss": "nll", "generator": "dense"},
    "federated-gs-wgan-record": {
        "unit": "record",
        "num_critics": 2,
        "clients_per_round": 2,
        "normalize_gradients": False,
    },
    "g-pate-votes": {"votes": True, "num_directions": 3, "num_bins": 4},
    "gradient-matching-real": {"init": "real", "augment": False},
    "gs-wgan-full": {"normalize_gradients": True, "generator": "residual"},
    "gs-wgan-step": {"routing": "step"},
    "kernel-points-dense": {"kernel": "dense", "zca": True, "learn_labels": True},
    "merf-conv": {"generator": "conv", "neighbours": "add-remove"},
    "private-set-soft": {
        "neighbours": "replace",
        "soft_label_weight": 0.5,
        "texture_norm": 0.5,
        "augmentations": 2,
    },
    "sliced-flow-private": {"space": "private", "autoencoder_dim": 4},
    "sliced-flow-public": {"space": "public", "autoencoder_dim": 4},
    "sliced-flow-records": {"mode": "records", "labeled": False, "space": "haar"},
    "sliced-flow-resampled": {"mode": "resampled", "diffusion": 0.1, "space": "wavelets"},
    "sliced-generator-records": {"mode": "records", "generator": "conv"},
}


def release_tiny_data(name, folder, settings):
    """A release of the tiny dataset, the method that made it, and what was declared to it."""
    method = make_method(name, {**tiny_settings.choose_tiny_settings(name), **settings})
    spec = tiny_settings.choose_spec(method)
    dataset = tiny_settings.make_method_input(method, *tiny_settings.make_records(), spec)
    more = {"ledger": folder / "ledger.jsonl", "runtime": CPU, "seed": 3, "insecure_seed": 5}
    return synthesize(dataset, method, tiny_settings.choose_epsilon(method), **more), method, spec


def describe_release(name, folder, settings):
    with coarse_accounting():
        release, method, spec = release_tiny_data(name, folder, settings)
        plan = method.plan(spec)
        cost = plan.cost()
    artifact = release.artifact
    yield from {"tensors": tensors_of(release), "samples": release.sample(7, seed=2)}.items()
    if artifact.kind == "generator":
        yield "tight samples", release.sample(5, seed=1, latent_scale=0.5)[0]
        yield "arguments", numbers(artifact.generator_config)
    if plan.stages:
        yield "plan", [[stage.noise_multiplier, stage.steps] for stage in plan.stages]
        yield "price", [cost.epsilon(1e-5), cost.max_tpr(0.01)]
    if facts := numbers(artifact.metadata):
        yield "facts", facts
    if forecast := numbers(method.forecast(spec, plan)):
        yield "forecast", forecast


@golden("method", list_methods())
def run_method(name, folder):
    return describe_release(name, folder, {})


@golden("method", VARIANTS)
def run_variant(label, folder):
    name = max((name for name in list_methods() if label.startswith(name)), key=len)
    return describe_release(name, folder, VARIANTS[label])


@golden("method/calibrated")
def run_calibrated(folder):
    """A budget sets the noise, and the release has a guarantee: chance is that of `isolate`."""
    for name in ("merf", "gs-wgan"):
        settings = tiny_settings.choose_tiny_settings(name)
        method = make_method(name, {k: settings[k] for k in settings if k != "noise_multiplier"})
        dataset = tiny_settings.seal_records(
            *tiny_settings.make_records(), tiny_settings.choose_spec(method)
        )
        with coarse_accounting():
            ledger = folder / f"{name}.jsonl"
            release = synthesize(dataset, method, 5.0, ledger=ledger, runtime=CPU)
        yield f"{name} tensors", tensors_of(release)
        yield f"{name} guarantee", numbers(release.guarantee)


@golden("method/entropic-gan-table")
def run_table(folder):
    words = ["0-1=laplace:4:-1:1", "2=unary:1:5", "3=randomized-response:2:3"]
    channel = parse_table_channel(words, 4)
    indices = torch.arange(60)[:, None]
    rows = torch.cat([2 * uniform(60, 2) - 1, indices % 5, indices % 3], 1)
    values = channel.privatize(rows, SecretRandom(0))
    dataset = PrivatizedDataset(values, channel, Spec((1, 1, 4), 1, 60), "sent")
    settings = {"batch_size": 8, "steps": 4, "latent_dim": 4, "hidden_dim": 8}
    release = synthesize(dataset, make_method("entropic-gan", settings), runtime=CPU)
    return {
        "tensors": tensors_of(release),
        "samples": release.sample(9)[0],
        "facts": numbers(release.artifact.metadata),
        "guarantee": numbers(release.guarantee),
    }


@golden("method/glyphs")
def run_glyph_pretraining(folder):
    """A generator that is pretrained on printed digits."""
    dataset = sensitive_digits(60, 60, name="sixty")
    settings = {"num_critics": 4, "steps": 2, "batch_size": 4, "critics_per_step": 2}
    settings |= {"pretrain_steps": 2, "noise_multiplier": 2.0, "critic_steps": 1}
    settings |= {"critic_channels": 4, "latent_dim": 4, "generator_channels": 4}
    settings |= {"warmup_rounds": 1, "critic_batch_size": 2, "pretrain": "glyphs"}
    with coarse_accounting():
        more = {"ledger": folder / "ledger.jsonl", "runtime": CPU, "insecure_seed": 1}
        release = synthesize(dataset, make_method("gs-wgan", settings), **more)
    return {"tensors": tensors_of(release), "samples": release.sample(10)[0]}


@golden("resize", ("private-set", "sliced-flow"))
def run_resize(name, folder):
    with coarse_accounting():
        release, *_ = release_tiny_data(name, folder, {})
        yield "larger", tensors_of(resize(release, 6, runtime=CPU))
        yield "smaller", tensors_of(resize(release, 2, settings={"steps": 3}, runtime=CPU))


@golden("release/files")
def run_files(folder):
    """A release that was written and read again, checked, and exported."""
    make_release().save(folder / "release")
    release = Release.load(folder / "release")
    guarantee = verify(folder / "release")
    images, labels = release.sample(6, seed=4)
    export.write_samples(images, labels, folder / "samples.npz", 3)
    with np.load(folder / "samples.npz") as arrays:
        exported = [arrays["x"], arrays["y"]]
    return {
        "tensors": tensors_of(release),
        "samples": [images, labels],
        "guarantee": numbers(guarantee),
        "exported": exported,
        "picture": np.asarray(render_image_grid(images, 3)),
    }


@golden("settings")
def run_settings(folder):
    """Default settings of all methods by data and device, and the seconds they would take."""
    small = Spec((1, 8, 8), 10, 1000, (100,) * 10, num_clients=20)
    large = Spec((3, 32, 32), 10, 50_000, (5000,) * 10, num_clients=50)
    pairs = ((small, "cuda"), (large, "cpu"), (small, "cpu"))
    for name in list_methods():
        fitted = [configure_method(name, {}, spec, torch.device(device)) for spec, device in pairs]
        forecast = fitted[-1].forecast(small, fitted[-1].plan(small))
        shorter = numbers(find_shorter_run(fitted[1], large))
        yield name, [*map(numbers, fitted), predict_cpu_seconds(forecast), shorter]
