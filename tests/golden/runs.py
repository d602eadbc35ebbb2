"""One small deterministic run of everything on the CPU, and SHA-256 digests of its results.

They show that a change which should not alter results, such as a rename or a move, alters none.
Every function that is marked with `golden` performs a run and returns values under its own names.
`digests.json` holds the digest of each value, and `test_golden.py` computes the digests again.
Store new digests only for a change that is meant to alter results; CHANGELOG.md then says so.

- Only values and shapes are digested, in an order that this file gives. Keys of dictionaries, names
  of classes, settings and files, and words of any kind have no part in a digest.
- Labels of runs, such as ``method/merf``, are keys of `digests.json`, and the random numbers of a
  run follow from its label. So a label stays when a thing is renamed: `RENAMED` has the new name.
- A run imports what it needs by itself, so that one broken import breaks one run.
- Bits differ between types of CPU and versions of libraries. `fingerprint` says where the digests
  were taken.

    python tests/golden/runs.py                     # compute all, and compare
    python tests/golden/runs.py --write             # compute all, and store
    python tests/golden/runs.py --write --only net  # those whose label contains a word
"""

import argparse
import base64
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import io
import itertools
import json
import math
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import scipy.linalg
import scipy.special
import sklearn.linear_model  # noqa: F401 (its libraries must be loaded when threads are limited)
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

HERE = Path(__file__).parent
STORED = HERE / "digests.json"
for place in (HERE.parent, HERE.parent / "federated"):  # quick.py, specimens.py; federation.py
    if str(place) not in sys.path:
        sys.path.append(str(place))

Values = dict[str, Any]
RUNS: dict[str, Callable[[Path], Values]] = {}

# label of a run -> the name that the thing has now, where that is another one
RENAMED: dict[str, str] = {
    "attack/canaries/scenes": "dead-leaves",
    "net/ConvDecodedGenerator": "ConvAutoencoderGenerator",
    "channel/mixed": "composite",
    "net/DecodedGenerator": "AutoencoderGenerator",
    "net/DeepConvGenerator": "DcganGenerator",
    "net/RecordGenerator": "TabularGenerator",
}


def golden(label: str, *items: str) -> Callable[[Callable[..., Values]], Callable[..., Values]]:
    """Register a run, a function of a folder; with items, one of a name and a folder for each."""

    def register(function: Callable[..., Values]) -> Callable[..., Values]:
        for item in items:
            own = f"{label}/{item}"
            RUNS[own] = lambda folder, own=own, item=item: function(RENAMED.get(own, item), folder)
        if not items:
            RUNS[label] = function
        return function

    return register


# Digests


def digest(value: Any) -> str:
    """SHA-256 of tensors, arrays, numbers, bytes, and lists of such."""
    found = hashlib.sha256()
    _feed(found.update, value)
    return found.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        update(f"tensor {value.dtype} {list(value.shape)};".encode())
        update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (bool, int, float, np.number, np.bool_)):
        update(f"{number(value)};".encode())
    elif isinstance(value, bytes):
        update(f"bytes {len(value)};".encode() + value)
    elif isinstance(value, (list, tuple)):
        update(f"list {len(value)};".encode())
        for each in value:
            _feed(update, each)
    elif value is None:
        update(b"none;")
    else:
        raise TypeError(f"{type(value).__name__} is not digested: no names, no words")


def number(value: Any) -> str:
    """A number in 12 significant digits.

    >>> number(0.1 + 0.2), number(3)
    ('0.3', '3.0')
    """
    return repr(float(f"{float(value):.12g}"))


def numbers(value: Any) -> list[float]:
    """The numbers in JSON, dataclasses and lists, by their position; keys and words are left out.

    >>> numbers({"a": [1, "two"], "b": {"c": 0.5}, "d": True})
    [1, 0.5, True]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in numbers(each)]
    return [value] if isinstance(value, (bool, int, float, np.number, np.bool_)) else []


def numbers_in(text: str) -> list[float]:
    """The numbers in a text, in their order.

    >>> numbers_in("epsilon 1.5 at 1e-5, 1,438 records")
    [1.5, 1e-05, 1438.0]
    """
    found = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text.replace(", ", " ; "))
    return [float(each.rstrip(",").replace(",", "")) for each in found]


def bag(values: Iterable[Any]) -> list[bytes]:
    """Values in no order, for dictionaries whose keys may be renamed and sorted."""
    return sorted(digest(each).encode() for each in values)


def about(value: Tensor) -> Tensor:
    """Eight decimals, for what depends on where in memory a tensor lies."""
    return value.double().round(decimals=8) + 0.0


# Surroundings


def fingerprint() -> dict[str, str]:
    """What the bits of a result depend on: versions, and a digest of typical computations."""
    names = (
        "torch",
        "numpy",
        "scipy",
        "scikit-learn",
        "dp-accounting",
        "torchmetrics",
        "POT",
        "xgboost-cpu",
        "pillow",
    )
    versions = {name: _version(name) for name in names}
    return {**versions, "cpu": torch.backends.cpu.get_cpu_capability(), "probe": probe()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def probe() -> str:
    """The digest of convolutions, products, decompositions and sorts of fixed numbers."""
    with alone("probe"):
        draws = rng(0)
        found: list[Any] = []
        for channels, width, side in ((1, 4, 8), (3, 16, 8), (16, 32, 12), (64, 64, 4)):
            images = torch.randn(5, channels, side, side, generator=draws, requires_grad=True)
            weights = torch.randn(width, channels, 3, 3, generator=draws, requires_grad=True)
            maps = nn.functional.conv2d(images, weights, padding=1)
            found += [maps, *torch.autograd.grad(maps.square().sum(), (images, weights))]
        for kind in (torch.float32, torch.float64):
            for size in (3, 17, 64, 150):
                left, right = torch.randn(2, 2, size, size, generator=draws, dtype=kind)
                square = left @ left.mT / size + torch.eye(size, dtype=kind)
                found += [
                    left @ right,
                    left[0] @ right[0, 0],
                    torch.linalg.eigh(square)[0],
                    torch.linalg.inv(square),
                ]
                found += [
                    torch.linalg.qr(left)[0],
                    torch.linalg.svdvals(right),
                    torch.linalg.cholesky(square),
                ]
            flat = torch.randn(1001, generator=draws, dtype=kind)
            found += [
                flat.exp(),
                flat.abs().log(),
                flat.tanh(),
                flat.sigmoid(),
                flat.cos(),
                flat.sum(),
                flat.std(),
            ]
            found += [
                flat.logsumexp(0),
                flat.softmax(0),
                flat.sort().values,
                flat.argsort(),
                flat.cumsum(0),
                flat.erf(),
            ]
            plain = flat.numpy()
            found += [
                plain @ plain,
                np.exp(plain),
                np.log1p(np.abs(plain)),
                plain.sum(),
                np.sort(plain),
            ]
        plain = np.linspace(-3, 3, 200).reshape(10, 20)
        found += [scipy.special.ndtr(plain), scipy.special.betaincinv(2.0, 5.0, (plain + 3) / 6)]
        found += [scipy.linalg.svdvals(plain), np.linalg.solve(plain @ plain.T + np.eye(10), plain)]
        return digest(found)


@contextlib.contextmanager
def alone(label: str) -> Iterator[Path]:
    """Within, chance follows from the label, one thread computes, and no user's file is touched."""
    calls = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.shake_256(f"{label} {next(calls)}".encode()).digest(size)

    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "little")
    threads = torch.get_num_threads()
    states = (np.random.get_state(), random.getstate())
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="golden-")))
        names = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
        places = {name: str(folder / "nowhere") for name in names}
        named = {
            "PRIVOT_HOME": str(folder / "nowhere" / "home"),
            "PRIVOT_DATA": str(folder / "nowhere" / "data"),
        }
        stack.enter_context(mock.patch.dict(os.environ, {**places, **named}))
        stack.enter_context(mock.patch.object(os, "urandom", urandom))
        stack.enter_context(mock.patch.object(random, "_urandom", urandom))  # of `secrets`
        stack.enter_context(mock.patch.object(os, "fsync", return_value=None))
        for name, module in list(sys.modules.items()):  # tests put a stand-in there, see steady.py
            if name.split(".")[0] == "privot" and vars(module).get("os", os) is not os:
                stack.enter_context(mock.patch.object(module, "os", os))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(threadpool_limits(1))
        torch.set_num_threads(1)
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            (work := folder / "work").mkdir()
            yield work
        finally:
            torch.set_num_threads(threads)
            np.random.set_state(states[0])
            random.setstate(states[1])


def compute(label: str) -> dict[str, str]:
    """The digests of one run, by the names of its values."""
    with alone(label) as folder:
        return {name: digest(value) for name, value in RUNS[label](folder).items()}


def changes(found: dict[str, str], stored: dict[str, str]) -> list[str]:
    """Names of values whose digests are not the stored ones."""
    return [name for name in {**stored, **found} if found.get(name) != stored.get(name)]


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*shape, generator=rng(seed), dtype=dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=dtype)


@contextlib.contextmanager
def coarse_accounting() -> Iterator[None]:
    """Sampled plans are priced on the coarsest grid, which is 30 times as quick."""
    from privot.privacy import accounting

    with mock.patch.object(accounting, "GRID_STEPS", accounting.GRID_STEPS[-1:]):
        yield


@contextlib.contextmanager
def no_weights() -> Iterator[None]:
    """No folder of the system has weights of networks."""
    from privot import io

    with mock.patch.object(
        io, "list_data_folders", return_value=[Path(os.environ["HOME"]) / "data"]
    ):
        yield


def cpu() -> Any:
    from privot.runtime import Runtime

    return Runtime("cpu")


def digits(count: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Images [count, 1, 8, 8] and labels [count] of the embedded digits."""
    from privot.data import load_dataset

    images, labels = load_dataset("digits", public=True).records()
    return images[start : start + count], labels[start : start + count]


def open_box(count: int, start: int = 0, **more: Any) -> Any:
    """Some digits as public data."""
    from privot.data import Public, Spec

    images, labels = digits(count, start)
    spec = Spec((1, 8, 8), 10, **more)
    return Public(images.numpy(), labels.numpy(), spec, name=f"digits from {start}")


# Methods


METHODS = (
    "conditional-gan",
    "distribution-matching",
    "dp-gan",
    "dp-sinkhorn",
    "entropic-gan",
    "federated-average-gan",
    "federated-gs-wgan",
    "g-pate",
    "gradient-matching",
    "gs-wgan",
    "kernel-points",
    "merf",
    "merf-ae",
    "private-set",
    "real-subset",
    "sliced-flow",
    "sliced-generator",
)

# label of a run -> method, settings beside the quick ones
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "distribution-matching-real": (
        "distribution-matching",
        {"init": "real", "augment": False, "ratio": 0.1},
    ),
    "dp-sinkhorn-batch": (
        "dp-sinkhorn",
        {"clip_unit": "batch", "l1_weight": 0.5, "fresh_fraction": 0.5},
    ),
    "entropic-gan-nll": ("entropic-gan", {"loss": "nll", "generator": "dense"}),
    "federated-gs-wgan-record": (
        "federated-gs-wgan",
        {"unit": "record", "num_critics": 2, "clients_per_round": 2, "normalize_gradients": False},
    ),
    "g-pate-votes": ("g-pate", {"votes": True, "num_directions": 3, "num_bins": 4}),
    "gradient-matching-real": ("gradient-matching", {"init": "real", "augment": False}),
    "gs-wgan-full": ("gs-wgan", {"normalize_gradients": True, "generator": "residual"}),
    "gs-wgan-step": ("gs-wgan", {"routing": "step"}),
    "kernel-points-dense": (
        "kernel-points",
        {"kernel": "dense", "zca": True, "learn_labels": True},
    ),
    "merf-conv": ("merf", {"generator": "conv", "neighbours": "add-remove"}),
    "private-set-soft": (
        "private-set",
        {
            "neighbours": "replace",
            "soft_label_weight": 0.5,
            "texture_norm": 0.5,
            "augmentations": 2,
        },
    ),
    "sliced-flow-private": ("sliced-flow", {"space": "private", "autoencoder_dim": 4}),
    "sliced-flow-public": ("sliced-flow", {"space": "public", "autoencoder_dim": 4}),
    "sliced-flow-records": ("sliced-flow", {"mode": "records", "labeled": False, "space": "haar"}),
    "sliced-flow-resampled": (
        "sliced-flow",
        {"mode": "resampled", "diffusion": 0.1, "space": "wavelets"},
    ),
    "sliced-generator-records": ("sliced-generator", {"mode": "records", "generator": "conv"}),
}


def released(name: str, folder: Path, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A release of the tiny data set, the method that made it, and what was declared to it."""
    from support.tiny_settings import (
        choose_epsilon,
        choose_spec,
        choose_tiny_settings,
        make_method_input,
        make_records,
    )

    from privot.methods import make_method
    from privot.synthesis import synthesize

    method = make_method(name, {**choose_tiny_settings(name), **settings})
    spec = choose_spec(method)
    box = make_method_input(method, *make_records(), spec)
    more = {"ledger": folder / "book.jsonl", "runtime": cpu(), "seed": 3, "insecure_seed": 5}
    return synthesize(box, method, choose_epsilon(method), **more), method, spec


def made(name: str, folder: Path, settings: dict[str, Any]) -> Values:
    with coarse_accounting():
        release, method, spec = released(name, folder, settings)
        plan = method.plan(spec)
        cost = plan.cost()
    product = release.artifact
    found: Values = {"tensors": bag(product.tensors.values()), "samples": release.sample(7, seed=2)}
    if product.kind == "generator":
        found["tight samples"] = release.sample(5, seed=1, latent_scale=0.5)[0]
        found["arguments"] = numbers(product.generator_config)
    if plan.stages:
        found["plan"] = [[stage.noise_multiplier, stage.steps] for stage in plan.stages]
        found["price"] = [cost.epsilon(1e-5), cost.max_tpr(0.01)]
    told = {"facts": numbers(product.metadata), "forecast": numbers(method.forecast(spec, plan))}
    return found | {name: value for name, value in told.items() if value}


@golden("method", *METHODS)
def _method(name: str, folder: Path) -> Values:
    return made(name, folder, {})


@golden("method", *VARIANTS)
def _variant(name: str, folder: Path) -> Values:
    return made(*VARIANTS[name][:1], folder, VARIANTS[name][1])


@golden("method/calibrated")
def _calibrated(folder: Path) -> Values:
    """A budget sets the noise, and the release has a guarantee: chance is that of `alone`."""
    from support.tiny_settings import choose_spec, choose_tiny_settings, make_records, seal_records

    from privot.methods import make_method
    from privot.synthesis import synthesize

    found = {}
    for name in ("merf", "gs-wgan"):
        method = make_method(
            name,
            {
                key: value
                for key, value in choose_tiny_settings(name).items()
                if key != "noise_multiplier"
            },
        )
        box = seal_records(*make_records(), choose_spec(method))
        with coarse_accounting():
            release = synthesize(box, method, 5.0, ledger=folder / f"{name}.jsonl", runtime=cpu())
        found[f"{name} tensors"] = bag(release.artifact.tensors.values())
        found[f"{name} guarantee"] = numbers(release.guarantee)
    return found


@golden("method/entropic-gan-table")
def _table(folder: Path) -> Values:
    from privot.data.spec import Spec
    from privot.local.dataset import PrivatizedDataset
    from privot.local.schema import parse_table_channel
    from privot.methods import make_method
    from privot.privacy.noise import SecretRandom
    from privot.synthesis import synthesize

    channel = parse_table_channel(
        ["0-1=laplace:4:-1:1", "2=unary:1:5", "3=randomized-response:2:3"], 4
    )
    places = torch.arange(60)[:, None]
    rows = torch.cat([2 * uniform(60, 2) - 1, places % 5, places % 3], 1)
    sent = PrivatizedDataset(
        channel.privatize(rows, SecretRandom(0)), channel, Spec((1, 1, 4), 1, 60), "sent"
    )
    method = make_method(
        "entropic-gan", {"batch_size": 8, "steps": 4, "latent_dim": 4, "hidden_dim": 8}
    )
    release = synthesize(sent, method, runtime=cpu())
    return {
        "tensors": bag(release.artifact.tensors.values()),
        "samples": release.sample(9)[0],
        "facts": numbers(release.artifact.metadata),
        "guarantee": numbers(release.guarantee),
    }


@golden("method/glyphs")
def _glyph_start(folder: Path) -> Values:
    """A generator that begins by learning printed digits."""
    from privot.data import Sensitive, Spec
    from privot.methods import make_method
    from privot.synthesis import synthesize

    images, labels = digits(60)
    box = Sensitive(images.numpy(), labels.numpy(), Spec((1, 8, 8), 10, 60), name="sixty")
    settings = {
        "num_critics": 4,
        "steps": 2,
        "batch_size": 4,
        "critics_per_step": 2,
        "pretrain_steps": 2,
        "noise_multiplier": 2.0,
        "critic_steps": 1,
        "critic_channels": 4,
    }
    settings |= {
        "latent_dim": 4,
        "generator_channels": 4,
        "warmup_rounds": 1,
        "critic_batch_size": 2,
        "pretrain": "glyphs",
    }
    with coarse_accounting():
        more = {"ledger": folder / "book.jsonl", "runtime": cpu(), "insecure_seed": 1}
        release = synthesize(box, make_method("gs-wgan", settings), **more)
    return {"tensors": bag(release.artifact.tensors.values()), "samples": release.sample(10)[0]}


@golden("resize", "private-set", "sliced-flow")
def _resize(name: str, folder: Path) -> Values:
    from privot.synthesis import resize

    with coarse_accounting():
        release, *_ = released(name, folder, {})
        more = resize(release, 6, runtime=cpu())
        other = resize(release, 2, settings={"steps": 3}, runtime=cpu())
    return {
        "larger": bag(more.artifact.tensors.values()),
        "smaller": bag(other.artifact.tensors.values()),
    }


@golden("release/files")
def _files(folder: Path) -> Values:
    """A release that was written and read again, checked, and exported."""
    from support.factories import make_release

    from privot.release import Release, export
    from privot.release.verify import verify
    from privot.runtime.preview import render_image_grid

    release = make_release()
    release.save(folder / "release")
    read = Release.load(folder / "release")
    checked = verify(folder / "release")
    images, labels = read.sample(6, seed=4)
    export.write_samples(images, labels, folder / "samples.npz", 3)
    with np.load(folder / "samples.npz") as arrays:
        exported = [arrays["x"], arrays["y"]]
    return {
        "tensors": bag(read.artifact.tensors.values()),
        "samples": [images, labels],
        "guarantee": numbers(checked),
        "exported": exported,
        "picture": np.asarray(render_image_grid(images, 3)),
    }


@golden("settings")
def _settings(folder: Path) -> Values:
    """Default settings of all methods by data and device, and the seconds they would take."""
    from privot.data.spec import Spec
    from privot.synthesis.cost import configure_method, find_shorter_run, predict_cpu_seconds

    small = Spec((1, 8, 8), 10, 1000, (100,) * 10, num_clients=20)
    large = Spec((3, 32, 32), 10, 50_000, (5000,) * 10, num_clients=50)
    found: Values = {}
    for label in METHODS:
        name = RENAMED.get(f"method/{label}", label)
        pairs = ((small, "cuda"), (large, "cpu"), (small, "cpu"))
        fitted = [configure_method(name, {}, spec, torch.device(device)) for spec, device in pairs]
        forecast = fitted[-1].forecast(small, fitted[-1].plan(small))
        shorter = numbers(find_shorter_run(fitted[1], large))
        found[label] = [*map(numbers, fitted), predict_cpu_seconds(forecast), shorter]
    return found


# Privacy


@golden("privacy/noise")
def _noise(folder: Path) -> Values:
    from decimal import Decimal

    from privot.privacy.noise import (
        SecretRandom,
        add_noise,
        bernoulli_bits,
        choose_grid,
        probability_bits,
    )

    secret = SecretRandom(7)
    return {
        "uniform": secret.uniform(11),
        "normal": secret.normal((3, 5)),
        "order": secret.permutation(13),
        "coins": [secret.bernoulli(bernoulli_bits(power), 50) for power in (-3, 0, 3)],
        "laplace": [secret.discrete_laplace((4, 6), places) for places in (0, 5, 12)],
        "chance": [list(bernoulli_bits(power)) for power in (-60, 0, 6)],
        "digits": list(probability_bits(Decimal("0.3"))),
        "grids": [choose_grid(*each) for each in ((1.0, 1.0), (0.5, 40.0), (3.0, 0.0))],
        "noisy": add_noise(torch.arange(8).double() * 1000, 2.0, 2.0**-20, secret),
        "whole": add_noise(torch.arange(8) * 2**40, 2.0, 2.0**-20, secret),
        "from the system": SecretRandom().normal((2, 2)),
    }


@golden("privacy/sampling")
def _sampling(folder: Path) -> Values:
    from privot.privacy.noise import SecretRandom
    from privot.privacy.sampling import Fixed, Full, Poisson, Shards

    secret = SecretRandom(3)
    return {
        "all": Full().draw(20, secret),
        "poisson": [Poisson(rate).draw(40, secret) for rate in (0.1, 0.5, 1.0)],
        "fixed": [Fixed(count, 20).draw(20, secret) for count in (1, 7, 20)],
        "shards": [Shards(count).draw(30, secret) for count in (1, 4)],
    }


def plans() -> dict[str, Any]:
    from privot.privacy.accounting import Neighbours
    from privot.privacy.plan import Plan, Stage
    from privot.privacy.sampling import Fixed, Poisson, Shards

    add_remove, replace, local, client = Neighbours
    response = Stage("a", "privatize", 0.7, mechanism="randomized_response")
    drawn = Stage("a", "sum", 1.0, 20, Poisson(0.1))
    return {
        "gaussian": Plan((Stage("a", "sum", 2.0), Stage("b", "sum", 5.0, 10)), replace),
        "client": Plan((Stage("a", "sum_over_shards", 3.0, 4),), client),
        "laplace": Plan((Stage("a", "privatize", 0.5, mechanism="laplace"),), local),
        "response": Plan((response, Stage("b", "privatize", 2.0)), local),
        "poisson": Plan((drawn, Stage("b", "sum", 6.0)), add_remove),
        "fixed": Plan((Stage("a", "sum", 1.5, 10, Fixed(20, 100)),), replace),
        "shards": Plan((Stage("a", "query_random_shards", 0.8, 30, Shards(10)),), replace),
    }


PLANS = ("gaussian", "client", "laplace", "response", "poisson", "fixed", "shards")


@golden("privacy/accounting", *PLANS)
def _accounting(name: str, folder: Path) -> Values:
    from privot.privacy import accounting
    from privot.privacy.plan import Plan

    plan = plans()[name]
    with coarse_accounting():
        cost = plan.cost()
        other = Plan.from_json(json.loads(json.dumps(plan.to_json()))).under_replace_one().cost()
    renyi = accounting.compute_renyi_cost(plan.event(), plan.neighbours)
    return {
        "epsilon": [cost.epsilon(delta) for delta in (1e-3, 1e-5, 1e-8)],
        "delta": cost.delta(np.array([0.1, 1.0, 3.0])),
        "power": [cost.max_tpr(rate) for rate in (0.001, 0.01, 0.1)],
        "renyi": renyi.epsilon(1e-5),
        "replaced": other.epsilon(1e-5),
        "mu": cost.mu,
    }


@golden("privacy/grids")
def _grids(folder: Path) -> Values:
    """Sampled plans on the grids that runs of the package take."""
    plan = plans()["poisson"]
    return {"epsilon": [plan.cost(roughly).epsilon(1e-5) for roughly in (False, True)]}


@golden("privacy/calibration")
def _calibration(folder: Path) -> Values:
    from privot.privacy.plan import AttackPowerTarget, Budget

    walls = [
        Budget(1.0),
        Budget(6.0, 1e-4),
        AttackPowerTarget(tpr=0.05, fpr=0.01),
        Budget(math.inf),
    ]
    found = {}
    with coarse_accounting():
        for name, plan in plans().items():
            if name not in ("gaussian", "client", "poisson", "fixed"):
                continue
            kept = walls if name in ("gaussian", "client") else walls[1:2]
            found[name] = [
                [stage.noise_multiplier for stage in plan.calibrate(wall).stages] for wall in kept
            ]
    return found


@golden("privacy/ledger")
def _ledger(folder: Path) -> Values:
    """The entries that two runs leave, without times, and what they sum up to."""
    from privot.privacy.charges import compute_total_cost
    from privot.privacy.ledger import Ledger
    from privot.privacy.plan import Budget

    with coarse_accounting():
        for name in ("merf", "gs-wgan", "federated-average-gan"):
            released(name, folder, {})
        entries = Ledger(folder / "book.jsonl").entries()
        book = Ledger(folder / "other.jsonl")
        whole = plans()
        tickets = [book.reserve(whole[name], name) for name in ("gaussian", "poisson")]
        tickets += [book.reserve_part(whole["client"], "parts", part, 3) for part in (0, 1)]
        total = book.compute_spent_cost()
        nothing = compute_total_cost([])
        book.set_limit(Budget(50.0))
    return {
        "numbers": numbers(entries),
        "answers": [bytes.fromhex(each["digest"]) for each in entries if "digest" in each],
        "tickets": tickets,
        "others": numbers(book.entries()),
        "spent": [total.epsilon(delta) for delta in (1e-4, 1e-6)],
        "nothing": nothing.epsilon(1e-5),
    }


@golden("privacy/guarantee")
def _guarantee(folder: Path) -> Values:
    from privot.privacy.guarantee import Guarantee

    names = ("gaussian", "client", "response", "poisson")
    with coarse_accounting():
        return {name: numbers(Guarantee.from_plan(plans()[name], 1e-6)) for name in names}


@golden("privacy/gate")
def _gate(folder: Path) -> Values:
    """Sums of a sealed box through the gate, with seeded noise, by classes and on draws."""
    from support.tiny_settings import make_records, seal_records

    from privot.data.spec import Spec
    from privot.privacy.accounting import Neighbours
    from privot.privacy.gate import Gate
    from privot.privacy.ledger import Ledger
    from privot.privacy.plan import Budget, Plan, Stage
    from privot.privacy.sampling import Poisson

    stages = (Stage("sums", "sum", 2.0, 2), Stage("drawn", "sum", 2.0, 2, Poisson(0.3)))
    plan = Plan(stages, Neighbours.ADD_REMOVE)
    box = seal_records(*make_records(), Spec((1, 8, 8), 3))
    with coarse_accounting():
        more = {"runtime": cpu(), "insecure_seed": 2}
        gate = Gate(box, plan, Ledger(folder / "a.jsonl"), Budget(1000.0), **more)
        found: list[Tensor] = []
        for by_class in (False, True):
            found.append(
                gate.sum("sums", lambda image, _: image[0], clip_norm=3.0, per_class=by_class)
            )
        for _ in range(2):
            found.append(gate.sum("drawn", lambda image, _: image[0, 0], clip_norm=1.0))
    return {"sums": found}


@golden("privacy/dealing")
def _dealing(folder: Path) -> Values:
    from privot.data import load_dataset
    from privot.privacy.client_partition import client_partition
    from privot.privacy.ledger import Ledger

    book = Ledger(folder / "digits.jsonl")
    box = load_dataset("digits", num_clients=400)
    parts = [client_partition(box, owner, book) for owner in (0, 7, 399)]
    return {"parts": [list(each._read_records(slice(None))) for each in parts]}


# Channels


CHANNELS = (
    "laplace",
    "laplace-ball",
    "laplace-pooled",
    "laplace-waves",
    "gaussian",
    "gaussian-ball",
    "gaussian-pooled",
    "gaussian-waves",
    "randomized-response",
    "unary",
    "optimized-unary",
    "mixed",
    "table",
)


def channel(label: str) -> Any:
    from privot.local.channels import Composite, Projection, get_channel_class
    from privot.local.schema import parse_table_channel

    name, _, way = label.partition("-")
    if name in ("laplace", "gaussian"):
        space = {
            "pooled": Projection(kind="pooled", shape=(1, 8, 8), side=4),
            "waves": Projection(kind="dct", shape=(1, 8, 8), side=3),
        }.get(way, Projection(shape=(1, 8, 8)))
        ball = {"radius": 2.0, "center": 0.25} if way == "ball" else {}
        return get_channel_class(name).calibrate(4.0, 1e-5, projection=space, **ball)
    if label == "composite":
        return Composite(
            parts=(
                channel("laplace-pooled"),
                channel("gaussian-waves"),
                channel("randomized-response"),
            )
        )
    if label == "table":
        return parse_table_channel(
            ["0-1=gaussian:4:-1:1", "2=optimized-unary:1:5", "3=laplace:2:0:9"], 4
        )
    return get_channel_class(label).calibrate(1.5, num_categories=10)


@golden("channel", *CHANNELS)
def _channel(label: str, folder: Path) -> Values:
    from privot.local.channels import channel_from_json
    from privot.privacy.noise import SecretRandom

    used = channel(label)
    images, labels = digits(9)
    flat = images.flatten(1)
    records = {
        1: labels[:, None].float(),
        64: flat,
        129: torch.cat([flat, flat.flip(1), labels[:, None].float()], 1),
        4: torch.cat([2 * uniform(9, 2) - 1, labels[:, None].float() % 5, 9 * uniform(9, 1)], 1),
    }[used.record_dim]
    sent = used.privatize(records, SecretRandom(11))
    points = used.to_points(records).double().requires_grad_()
    cost = used.compute_cost_matrix(points, sent)
    (slope,) = torch.autograd.grad(cost.sum(), points)
    stated = [
        used.epsilon,
        used.delta,
        used.temperature,
        used.compute_expected_cost(),
        used.predict_signal_to_noise(1000),
    ]
    again = channel_from_json(json.loads(json.dumps(used.to_json())))
    return {
        "sent": sent,
        "points": points,
        "cost": cost,
        "slope": slope,
        "stated": stated,
        "again": [
            again.epsilon,
            again.with_epsilon(2.0).epsilon,
            again.with_epsilon(2.0).temperature,
            again.is_possible_output(sent),
        ],
        "plan": [stage.noise_multiplier for stage in used.plan().stages],
    }


@golden("channel/privatize")
def _privatize(folder: Path) -> Values:
    """Whole boxes through channels, as a client does it, and what the files prove."""
    from privot.data.dataset import Sensitive
    from privot.data.spec import Spec
    from privot.local.dataset import PrivatizedDataset
    from privot.local.privatize import (
        build_image_channel,
        compute_channel_guarantee,
        privatize,
        verify_privatized,
    )

    images, labels = digits(30)
    spec = Spec((1, 8, 8), 10, 30)
    found = {}
    for name in ("laplace", "gaussian"):
        used = build_image_channel(
            spec, name, 20.0, 1e-5, labels_epsilon=3.0, projection_kind="pooled", projection_side=4
        )
        box = Sensitive(images.numpy(), labels.numpy(), spec)
        more = {"ledger": folder / f"{name}.jsonl"}
        found[f"{name} seeded"] = privatize(box, used, **more, insecure_seed=4).values
        file = folder / f"{name}.safetensors"
        privatize(box, used, **more, out=file)
        found[f"{name} file"] = PrivatizedDataset.load(file).values
        found[f"{name} certificate"] = numbers(compute_channel_guarantee(used))
        found[f"{name} verified"] = verify_privatized(file)["epsilon_from_events"]
    return found


# Transport


@golden("transport/sinkhorn")
def _sinkhorn(folder: Path) -> Values:
    from privot.transport import sinkhorn

    x = uniform(2, 7, 3, seed=1).requires_grad_()
    y = uniform(2, 5, 3, seed=2)
    weights = uniform(7, seed=3) + 0.1
    cost = sinkhorn.squared_euclidean_cost(x, y, l1_weight=0.3)
    loss = sinkhorn.entropic_transport_cost(
        cost, 0.05, a=weights / weights.sum(), num_iterations=15
    )
    parted = sinkhorn.sinkhorn_divergence(x, y, 0.1, num_iterations=10)
    half = sinkhorn.semi_debiased_loss(x, x.roll(1, 1), y, 0.1, l1_weight=0.2, num_iterations=10)
    (slope,) = torch.autograd.grad((loss + parted + half).sum(), x)
    return {
        "cost": cost,
        "potentials": list(sinkhorn.solve_potentials(cost, 0.05, num_iterations=12)),
        "plan": sinkhorn.transport_plan(cost, 0.05, num_iterations=12),
        "losses": [loss, parted, half],
        "slope": slope,
        "even": sinkhorn.uniform_weights(cost, -1),
    }


@golden("transport/entropic")
def _entropic(folder: Path) -> Values:
    from privot.transport import entropic
    from privot.transport.costs import l1_cost
    from privot.transport.sinkhorn_iterations import LogIteration

    found: Values = {
        "sweeps": [entropic.count_sufficient_iterations(each) for each in (0.5, 2.0, 10.0, 300.0)]
    }
    for scale in (1.0, 30.0):
        x = normal(9, 20, seed=4).requires_grad_()
        y = scale * normal(11, 20, seed=5)
        cost = l1_cost(x, y)
        for count in (None, 12):
            settled = entropic.solve_sinkhorn(cost, 2.0, count)
            found[f"settled {scale} {count}"] = [
                settled.f,
                settled.g,
                settled.marginal_error,
                settled.num_iterations,
            ]
        losses = [entropic.entropic_loss(cost, 2.0), entropic.likelihood_loss(cost, 2.0)]
        found[f"losses {scale}"] = losses
        slopes = [torch.autograd.grad(each, x, retain_graph=True)[0] for each in losses]
        found[f"slopes {scale}"] = slopes
    stride = LogIteration(cost.detach() / 2).run(torch.zeros(11), 6)
    found["logarithms"] = list(stride)
    return found


@golden("transport/sliced")
def _sliced(folder: Path) -> Values:
    from privot.transport import sliced, sliced_distance

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
    many = points.expand(2, 8, 4)
    return {
        "frame": frame,
        "stretched": [sliced.resample_quantiles(targets, count) for count in (1, 5, 9)],
        "assigned": [
            sliced.slice_targets(normal(12, 8, seed=4), targets, bits) for bits in (16, 32)
        ],
        "steps": [sliced.sliced_flow_step(points, frame, targets, rate) for rate in (0.3, 1.0)],
        "measured": list(
            sliced.sliced_flow_step_with_error(many, frame, targets.expand(2, 12, 5), 0.5)
        ),
        "losses": losses,
        "slopes": [torch.autograd.grad(each, x)[0] for each in losses],
        "slices": sliced_distance.slice_distances(points, y, frame, 2),
    }


@golden("transport/sorting")
def _sorting(folder: Path) -> Values:
    from privot.transport import sorting

    values = normal(5, 40, seed=0).requires_grad_()
    ordered = sorting.sort_rows(values)
    (slope,) = torch.autograd.grad((ordered * torch.arange(40)).sum(), values)
    plain = values.detach()
    return {
        "ranks": [
            sorting.argsort_rows(plain),
            sorting.argsort_rows(plain, 16),
            sorting.argsort_rows(plain.double()),
        ],
        "coarse": sorting.quantize_keys(plain),
        "packed": sorting.sort_packed_keys(plain),
        "ordered": [ordered, sorting.sort_rows(plain)],
        "slope": slope,
        "monotone": sorting.isotonic_regression(plain),
    }


@golden("transport/absolute")
def _absolute(folder: Path) -> Values:
    from privot.transport.costs import l1_cost

    found = {}
    for dim in (3, 40):
        x = normal(6, dim, seed=1).requires_grad_()
        y = (3 * normal(7, dim, seed=2)).requires_grad_()
        cost = l1_cost(x, y)
        weights = uniform(6, 7, seed=3)
        found[f"{dim}"] = [cost, *torch.autograd.grad((cost * weights).sum(), (x, y))]
    found["batches"] = l1_cost(uniform(2, 3, 4, seed=5), uniform(2, 5, 4, seed=6))
    return found


@golden("transport/extrapolation")
def _extrapolation(folder: Path) -> Values:
    from privot.transport.anderson import AndersonAcceleration

    x = uniform(6, seed=1)
    shrink = 0.3 + 0.6 * uniform(6, seed=2)
    steps = AndersonAcceleration(x)
    heads = []
    for _ in range(5):
        y = shrink * x + 0.1
        steps.record(x, y, y.sum())
        ahead = steps.extrapolate()
        heads.append(ahead)
        x = y
    return {"heads": heads}


# Networks


GENERATORS = (
    "ConvDecodedGenerator",
    "ConvGenerator",
    "DecodedGenerator",
    "DeepConvGenerator",
    "DenseGenerator",
    "RecordGenerator",
    "ResidualGenerator",
)


@golden("net", *GENERATORS)
def _generator(name: str, folder: Path) -> Values:
    from privot.nets import GENERATORS, initialize_weights

    sizes: list[dict[str, Any]] = [
        {"shape": (1, 8, 8), "classes": 3},
        {"shape": (3, 12, 10), "classes": 2},
    ]
    if name == RENAMED.get("net/RecordGenerator", "RecordGenerator"):
        sizes = [{"shape": (1, 1, 3), "classes": 2, "columns": [[2, -1.0, 1.0], [5]]}]
    small = {"channels": 4} if "channels" in GENERATORS[name].__init__.__code__.co_varnames else {}
    found = {}
    for turn, size in enumerate(sizes):
        net: Any = initialize_weights(GENERATORS[name](**size, **small), rng(turn))
        codes = normal(4, net.latent_dim, seed=5)
        labels = torch.arange(4) % size["classes"]
        drawn = net(codes, labels)
        loss = drawn.square().sum()
        weights = [each for each in net.parameters() if each.requires_grad]
        slopes = torch.autograd.grad(loss, weights, allow_unused=True) if loss.requires_grad else []
        found[f"images {turn}"] = [drawn, net.eval()(codes, labels)]
        found[f"slopes {turn}"] = list(slopes)
        found[f"weights {turn}"] = list(net.state_dict().values())
    return found


def looked(net: nn.Module, *given: Tensor, seed: int = 0) -> list[Tensor]:
    """What a net of seeded weights gives while it learns, its slopes, and what it gives after."""
    from privot.nets import initialize_weights

    initialize_weights(net, rng(seed))
    out = net(*given)
    slopes = torch.autograd.grad(out.square().sum(), list(net.parameters()), allow_unused=True)
    with torch.no_grad():
        return [out, *(each for each in slopes if each is not None), net.eval()(*given)]


@golden("net/classifiers")
def _classifiers(folder: Path) -> Values:
    from privot.nets.classifiers.convnet import ConvNet
    from privot.nets.classifiers.lenet import LeNet
    from privot.nets.classifiers.resnet import ResNet18
    from privot.nets.classifiers.vgg import VGG11

    grey = uniform(3, 1, 8, 8)
    colour = uniform(2, 3, 20, 20)
    return {
        "lenet": [looked(LeNet((1, 8, 8), 4), grey), looked(LeNet((3, 20, 20), 4), colour)],
        "convnet": [
            looked(ConvNet((1, 8, 8), 4, 8), grey),
            looked(ConvNet((3, 20, 20), 4, 8, 2), colour),
        ],
        "vgg": looked(VGG11((1, 8, 8), 4), grey)[0],
        "resnet": looked(ResNet18((1, 8, 8), 4), grey)[0],
    }


@golden("net/critics")
def _critics(folder: Path) -> Values:
    from privot.nets.dp_critic import PrivateCritic, count_critic_multiplications
    from privot.nets.flat_weights import adam_step
    from privot.nets.functional_critic import Critic
    from privot.nets.generators.dcgan import ProjectionCritic, gradient_penalty
    from privot.nets.tiny_generator import TinyGenerator

    images = uniform(4, 1, 8, 8)
    labels = torch.arange(4) % 3
    critic = Critic((1, 8, 8), 3, 4)
    sketch = TinyGenerator((1, 8, 8), 3, 4, 4)
    weights, along = critic.init_weights(2, rng(0))
    weights = weights + 0.01 * normal(*weights.shape, seed=1)
    drawn = sketch.init_weights(2, rng(1))
    turned = torch.func.vmap(critic.power_iterate)(weights, along)
    draw = torch.func.vmap(sketch.generate, in_dims=(0, None, None))
    fakes = draw(drawn, normal(4, 4, seed=2), labels)
    learn = torch.func.grad_and_value(critic.loss)
    each = torch.func.vmap(learn, in_dims=(0, 0, None, 0, None, None))
    slope, loss = each(weights, turned, images, fakes, labels, uniform(4, seed=3))
    empty = torch.zeros_like(slope)
    state = adam_step(weights, slope, empty, empty, torch.tensor(1.0), 0.01)
    shown = images.clone().requires_grad_()
    judge = ProjectionCritic((1, 8, 8), 3, 4)
    found = looked(judge, images, labels)
    return {
        "side by side": [weights, along, turned, fakes, slope, loss, *state],
        "work": [critic.flops, count_critic_multiplications((3, 32, 32), 8)],
        "projection": found,
        "steep": gradient_penalty(judge(shown, labels), shown),
        "private": looked(PrivateCritic((1, 9, 8), 3, 4), uniform(4, 1, 9, 8), labels),
    }


@golden("net/autoencoders")
def _autoencoders(folder: Path) -> Values:
    from privot.nets.autoencoders import ConvAutoencoder
    from privot.nets.dp_autoencoder import Autoencoder

    images = uniform(4, 1, 8, 8)
    small = ConvAutoencoder((1, 8, 8), 3, 4)
    found = {
        "convolutional": looked(small, images),
        "large": looked(ConvAutoencoder((3, 36, 36), 4, 2), uniform(2, 3, 36, 36)),
        "dense": looked(Autoencoder((1, 8, 8), 3, 6, 5), images),
    }
    small.encoder.standardize_latents(images)
    return {**found, "spread": small.encoder.encode_unnormalized(images)}


@golden("net/ensemble")
def _ensemble(folder: Path) -> Values:
    from privot.nets.conv_shapes import ConvNetShapes
    from privot.nets.ensemble import Ensemble, FrozenEnsemble

    nets = Ensemble(3, (1, 8, 8), 4, 4, texture_norm=0.5, generator=rng(0))
    images = uniform(5, 1, 8, 8)
    logits = nets(images)
    slopes = torch.autograd.grad(logits.square().sum(), list(nets.parameters()), allow_unused=True)
    chosen = nets.select(torch.tensor([2, 0]))
    other = Ensemble(2, (1, 8, 8), 4, 4, generator=rng(1))
    other.copy_blocks_from(nets)
    outline = ConvNetShapes((3, 28, 28), 16, 3)
    return {
        "logits": [logits, nets(uniform(3, 5, 1, 8, 8))],
        "slopes": [each for each in slopes if each is not None],
        "features": nets.features(images, chosen),
        "seen": nets.extract_features(images, FrozenEnsemble(nets)[torch.tensor([1, 2])]),
        "layers": nets.pool_block_features(images, max_side=2),
        "followed": list(other.state_dict().values()),
        "outline": [
            outline.num_blocks,
            outline.num_features,
            outline.num_activations,
            outline.flops,
            nets.num_extracted_features,
        ],
    }


@golden("net/training")
def _training(folder: Path) -> Values:
    from privot.nets.augment import AUGMENTATIONS
    from privot.nets.classifiers.convnet import ConvNet
    from privot.nets.classifiers.lenet import LeNet
    from privot.nets.ensemble import Ensemble
    from privot.nets.training import Recipe, train_classifier, train_ensemble

    images, labels = digits(20)
    recipes = {
        "plain": Recipe(
            2,
            0.05,
            batch_size=8,
            weight_decay=1e-3,
            lr_milestones=(1,),
            max_shift=1,
            horizontal_flip=True,
        ),
        "adam": Recipe(
            2,
            1e-3,
            batch_size=8,
            use_adam=True,
            ema_decay=0.9,
            even_batches=True,
            half_precision=True,
        ),
        "augmented": Recipe(1, 0.05, batch_size=8, augmentations=AUGMENTATIONS),
    }
    found: Values = {}
    for name, recipe in recipes.items():
        net = train_classifier(LeNet, images, labels, 10, recipe, torch.device("cpu"), seed=3)
        found[name] = [
            net.predict_proba(images),
            net.predict(images),
            *net.net.state_dict().values(),
        ]
    many = dataclasses.replace(recipes["augmented"], num_repeats=2)
    side = train_classifier(ConvNet, images, labels, 10, many, torch.device("cpu"))
    found["repeated"] = [side.predict_proba(images), side.features(images)]
    for name, generators in (("one", rng(1)), ("each", [rng(1), rng(2)])):
        nets = Ensemble(2, (1, 8, 8), 10, 4, generator=rng(0))
        soft = nn.functional.one_hot(labels, 10).float() * 0.9 + 0.01
        train_ensemble(nets, images, soft, recipes["augmented"], generators)
        found[name] = list(nets.state_dict().values())
    return found


@golden("net/pictures")
def _pictures(folder: Path) -> Values:
    from privot.components.dead_leaves import generate_dead_leaves
    from privot.components.glyphs import pretrain_on_glyphs, render_glyphs
    from privot.nets import augment
    from privot.nets.generators.dense import DenseGenerator

    drawn = augment.sample_augment_params(12, (8, 6), rng(0))
    net = DenseGenerator((1, 8, 8), 10, 4, 8, 4)
    start = looked(net, normal(3, 4), torch.arange(3))
    pretrain_on_glyphs(net.train(), 4, (1, 8, 8), 10, 3, 5, rng(2))
    here = torch.device("cpu")
    codes = normal(6, 16)
    return {
        "drawn": list(drawn),
        "augmented": augment.apply_augmentations(uniform(12, 3, 8, 6), drawn),
        "scenes": [
            list(generate_dead_leaves(3, 2, shape, rng(1), here))
            for shape in ((3, 8, 8), (1, 6, 9))
        ],
        "glyphs": [
            render_glyphs(codes, torch.arange(6), (1, 12, 12), classes) for classes in (10, 62)
        ],
        "taught": [start, list(net.state_dict().values())],
    }


@golden("net/kernels")
def _kernels(folder: Path) -> Values:
    from privot.baselines.kernel_ridge import (
        ConvFeatureRegression,
        DenseNtkRegression,
        solve_kernel_ridge,
    )
    from privot.baselines.ntk import compute_neural_tangent_kernel
    from privot.baselines.zca import ZcaWhitening
    from privot.nets.ensemble import Ensemble

    support = uniform(4, 1, 8, 8, seed=1)
    images = uniform(6, 1, 8, 8, seed=2)
    labels = torch.eye(4)
    features = ConvFeatureRegression(Ensemble(2, (1, 8, 8), 2, 4, generator=rng(0)))
    first = features.predict(support, labels, images, 1e-3)
    features.resample(rng(5))
    moved = support.clone().requires_grad_()
    dense = DenseNtkRegression(2).predict(moved, labels, images, 1e-3)
    white = ZcaWhitening(images)
    tangents = compute_neural_tangent_kernel(support.double(), images.double(), 3)
    return {
        "features": [first, features.predict(support, labels, images, 1e-3)],
        "dense": [dense, torch.autograd.grad(dense.square().sum(), moved)[0]],
        "tangents": tangents,
        "solved": solve_kernel_ridge(tangents @ tangents.T, labels, 1e-2),
        "white": [white(images), white.inverse_transform(white(images))],
    }


@golden("net/matching")
def _matching(folder: Path) -> Values:
    from privot.components.dct import LearnableImages, centered_dct_basis, dct_basis
    from privot.components.feature_matching import (
        MatchingRound,
        compute_unit_features,
        match_features,
    )
    from privot.nets import augment
    from privot.nets.ensemble import Ensemble

    nets = Ensemble(2, (1, 8, 8), 3, 4, generator=rng(0)).requires_grad_(False)
    drawn = augment.sample_augment_params(4, 8, rng(1))
    centre = 0.1 * normal(4, nets.num_extracted_features, seed=2)
    part = MatchingRound(
        nets, drawn, centre, 0.1 * normal(4, 3, nets.num_extracted_features, seed=3), 1.0
    )
    images = uniform(6, 1, 8, 8, seed=4)
    settings = {
        "steps": 3,
        "nets_per_step": 2,
        "learning_rate": 0.05,
        "generator": rng(5),
        "progress": lambda step, of: None,
    }
    weights = nets.select(torch.tensor([0, 1, 0, 1]))
    return {
        "unit": [
            compute_unit_features(nets, weights, images, drawn, each) for each in (None, centre)
        ],
        "matched": [
            match_features(images, [part], frequency_fraction=detail, **settings)
            for detail in (1.0, 0.5)
        ],
        "canvas": LearnableImages(images, 0.5).to_images(),
        "waves": [dct_basis(8, 3), centered_dct_basis(9, 4, 2)],
    }


@golden("net/averaged")
def _averaged(folder: Path) -> Values:
    from privot.nets import ConvGenerator, initialize_weights
    from privot.nets.ema import EmaTrainer, cosine_warmup

    net: Any = initialize_weights(ConvGenerator((1, 8, 8), 3, 4, 8, 4), rng(0))
    pair = EmaTrainer(net, 0.01, (0.5, 0.9), 0.99)
    codes = normal(6, 4)
    labels = torch.arange(6) % 3
    for step in range(3):
        pair.net(codes, labels).square().sum().backward()
        pair.prepare_step(cosine_warmup(0.01, step, 3))
        pair.apply_step()
    kept = pair.state_dict()
    mean = pair.recalibrate(lambda each: each(codes, labels))
    return {"kept": bag(kept.values()), "mean": list(mean.state_dict().values())}


@golden("net/convolutions")
def _convolutions(folder: Path) -> Values:
    """Convolutions of networks side by side, with their second derivatives."""
    from privot.nets.vmap_conv import batched_conv, convolve

    x = normal(3, 2, 2, 6, 6)
    weight = normal(3, 4, 2, 3, 3, seed=1)
    bias = normal(3, 4, seed=2)
    found = {}
    for name, function in (("torch", convolve), ("faces", batched_conv)):

        def steep(own: Tensor, maps: Tensor, bias: Tensor, function: Any = function) -> Tensor:
            def value(each: Tensor) -> Tensor:
                return function(each, own, bias, 2, 1).tanh().sum()

            return torch.func.grad(value)(maps).square().sum()

        outs = torch.func.vmap(functools.partial(function, stride=2, padding=1))(x, weight, bias)
        found[name] = [outs, torch.func.vmap(torch.func.grad(steep))(weight, x, bias)]
    return found


@golden("net/large")
def _large(folder: Path) -> Values:
    """The networks of FID and LPIPS with random weights."""
    from privot.measures.networks.inception import Inception, resize_like_tensorflow
    from privot.measures.networks.lpips import Lpips

    lpips = Lpips()
    looked(lpips.net.features, uniform(1, 3, 64, 64))
    with torch.no_grad():
        for head in lpips.heads:
            head.uniform_(0, 1, generator=rng(3))
        inception = Inception(logits=True).eval()
        for place, each in enumerate(inception.parameters()):
            reach = 1.5 / math.sqrt(each[0].numel()) if each.ndim > 1 else 0.1
            each.copy_(reach * normal(*each.shape, seed=place))
        images = uniform(1, 3, 64, 64, seed=1), uniform(1, 3, 64, 64, seed=2)
        return {
            "lpips": lpips(*images),
            "inception": inception.features(uniform(1, 1, 8, 8)),
            "resized": resize_like_tensorflow(uniform(2, 1, 5, 7), 11),
        }


# Data


@golden("data")
def _data(folder: Path) -> Values:
    from privot.data import Sensitive, Spec, load_dataset

    images, labels = digits(6)
    np.savez(
        folder / "some.npz",
        x=(images * 255).byte().permute(0, 2, 3, 1).numpy(),
        y=labels.numpy() % 3,
    )
    read = load_dataset(folder / "some.npz", public=True).records()
    broken = np.array(images)
    broken[0, 0, 0, 0] = np.nan
    broken[1, 0, 0, 0] = 7.0
    mended = Sensitive(broken, labels.numpy(), Spec((1, 8, 8), 10), repair=True)
    owned = Sensitive(images.numpy(), labels.numpy(), Spec((1, 8, 8), 10, num_clients=4))
    order = np.array([3, 1, 5, 0, 2, 4])
    return {
        "digits": [
            list(load_dataset("digits", each, public=True).records()) for each in ("train", "test")
        ],
        "file": list(read),
        "mended": list(mended._read_records(slice(None))),
        "laid": owned._shard_record_indices(torch.arange(4), 1, 3, order),
    }


# Audits: from scores to statements


def scores() -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(3)
    return draws.normal(1.0, 1.0, 300), draws.normal(0.0, 1.0, 400).round(2)


@golden("audit/curve")
def _curve(folder: Path) -> Values:
    from privot.audit import bootstrap_mean_auc, compute_roc, estimate_advantage
    from privot.audit.roc import count_above, find_thresholds

    members, others = scores()
    curve = compute_roc(members, others)
    return {
        "curve": [curve.fpr, curve.tpr, curve.auc, curve.max_advantage()],
        "read": [curve.measured_tpr_at([0.001, 0.01, 0.1]), list(curve.sample_log_spaced(20))],
        "advantage": numbers(estimate_advantage(members, others, seed=2)),
        "mean": numbers(bootstrap_mean_auc([(members[::2], others), (members[1::2], others)])),
        "cuts": [found := find_thresholds(members, others), count_above(members, found)],
    }


@golden("audit/rates")
def _rates(folder: Path) -> Values:
    from privot.audit import clopper_pearson_lower, clopper_pearson_upper, estimate_tpr_at_fpr

    members, others = scores()
    hits = np.arange(0, 50, 7)
    levels = (0.01, 0.1, 0.3)
    return {
        "bounds": [clopper_pearson_lower(hits, 50, 0.05), clopper_pearson_upper(hits, 50, 0.05)],
        "points": [
            numbers(estimate_tpr_at_fpr(members, others, levels, 0.9, each))
            for each in (False, True)
        ],
        "attack": numbers(
            estimate_tpr_at_fpr(members, others, (0.1,)).to_attack_result("some", auc=0.7)
        ),
    }


@golden("audit/bounds")
def _bounds(folder: Path) -> Values:
    from privot.audit import audit_many_runs, compute_gaussian_epsilon
    from privot.audit.many_runs import compute_refuted_epsilon, compute_refuted_mu

    members, others = scores()
    ways = [{"threshold": 0.5}, {}, {"assume_gaussian": True}, {"confidence": 0.8, "seed": 4}]
    counts = np.arange(1, 40, 6), np.arange(0, 14, 2), 50, 60, 1e-5, 0.05
    return {
        "many runs": [numbers(audit_many_runs(members, others, 1e-5, **way)) for way in ways],
        "epsilon": [compute_gaussian_epsilon(mu, 1e-5) for mu in (0.1, 1.0, 3.0)],
        "counts": [compute_refuted_epsilon(*counts), compute_refuted_mu(*counts)],
    }


@golden("audit/one-run")
def _one_run(folder: Path) -> Values:
    from privot.audit import audit_one_run, audit_one_run_gaussian
    from privot.audit.one_run import compute_guess_p_value, is_tradeoff_refuted

    coins = np.random.default_rng(5).random(120) < 0.5
    seen = coins + np.random.default_rng(6).normal(0, 0.6, 120)
    guesses = (40, (20, 10), [(10, 10), (30, 30)])
    return {
        "plain": [numbers(audit_one_run(seen, coins, 1e-5, each)) for each in guesses],
        "gaussian": [numbers(audit_one_run_gaussian(seen, coins, 1e-5, each)) for each in guesses],
        "chance": [
            compute_guess_p_value(30, 40, 120, epsilon, 1e-4) for epsilon in (0.0, 1.0, 2.0)
        ],
        "refuted": [
            is_tradeoff_refuted(120, 40, each, lambda tpr: tpr / np.e, 0.05)
            for each in (20, 30, 40)
        ],
    }


@golden("audit/verdict")
def _verdict(folder: Path) -> Values:
    from support.factories import NO_GUARANTEE, make_release

    from privot.audit import audit_many_runs, estimate_tpr_at_fpr, judge

    members, others = scores()
    claim = make_release().guarantee
    found = {}
    for name, made_of in (("proved", claim), ("none", NO_GUARANTEE)):
        verdicts = [
            judge(audit_many_runs(members, others, 1e-5, threshold=0.5), made_of),
            judge(
                estimate_tpr_at_fpr(members, others, (0.001, 0.01, 0.1), certify_fpr=True), made_of
            ),
            judge(
                estimate_tpr_at_fpr(members + 9, others, (0.001, 0.01, 0.1), certify_fpr=True),
                made_of,
            ),
        ]
        found[name] = [[*numbers(each), each.is_broken, each.is_inconclusive] for each in verdicts]
    return found


# Membership attacks


def few_sides(seed: int) -> Any:
    """Some of those that the controls of attacks ask about."""
    from privot.attacks.membership.control_data import ControlData, draw_digits
    from privot.data.dataset import Records

    return ControlData(*(Records(each.images[:40], each.labels[:40]) for each in draw_digits(seed)))


def fewer_sides(seed: int) -> Any:
    """A few of two classes."""
    from privot.attacks.membership.control_data import ControlData, draw_digits
    from privot.data.dataset import Records

    found = []
    for each in draw_digits(seed):
        some = (each.labels < 2).nonzero().flatten()[:6]
        found.append(Records(each.images[some], each.labels[some]))
    return ControlData(*found)


MEMBERSHIP = (
    "loss",
    "lira",
    "lira-offline",
    "lira-pixels",
    "lira-features",
    "rmia",
    "nearest-pixels",
    "nearest-features",
    "nearest-lpips",
    "real-start",
    "tracing",
    "gan-leaks-full",
    "gan-leaks-partial",
    "gan-leaks-white",
)


@golden("attack", *MEMBERSHIP)
def _membership(name: str, folder: Path) -> Values:
    """An attack on a small control that leaks, and on one that cannot."""
    from privot.attacks.membership.control_data import (
        build_blurred_set,
        build_memorizing_artifact,
        build_shifted_set,
        draw_mislabeled_digits,
    )
    from privot.attacks.membership.controls import Control
    from privot.measures import nearest

    learned = Control(build_blurred_set, draw_mislabeled_digits, 10)
    searched = Control(build_memorizing_artifact, fewer_sides)
    chosen = {
        "loss": learned,
        "lira": learned,
        "lira-offline": learned,
        "rmia": learned,
        "nearest-lpips": Control(build_blurred_set, fewer_sides),
        "real-start": Control(build_shifted_set, few_sides),
        "tracing": Control(build_blurred_set),
        "gan-leaks-full": Control(build_memorizing_artifact, few_sides),
        "gan-leaks-partial": searched,
        "gan-leaks-white": searched,
    }
    current = {RENAMED.get(f"attack/{label}", label): label for label in MEMBERSHIP}
    control = chosen.get(current[name], Control(build_blurred_set, few_sides))
    with mock.patch.object(nearest, "load_lpips_network", random_lpips):
        sides = [control.score(name, leaks, 0) for leaks in (True, False)]
    return {"leaky": list(sides[0]), "null": list(sides[1])}


def random_lpips(device: Any = None) -> Any:
    """The network of LPIPS with seeded weights."""
    from privot.measures.networks.lpips import Lpips
    from privot.nets import initialize_weights

    net = Lpips()
    initialize_weights(net.net, rng(1))
    with torch.no_grad():
        for head in net.heads:
            head.uniform_(0, 1, generator=rng(2))
    return net.eval().requires_grad_(False)


@golden("attack/functions")
def _functions(folder: Path) -> Values:
    """The functions of the attacks, with options that no other run takes."""
    from privot.attacks.membership import lira, loss, nearest, rmia
    from privot.measures.nearest import search_nearest_neighbours

    draws = np.random.default_rng(1)
    members = lira.balanced_membership(12, 8, rng(2))
    seen = members + draws.normal(size=members.shape)
    twice = np.stack([seen, seen + draws.normal(size=seen.shape)], 2)
    logs = -np.abs(seen) - 0.01
    population = -np.abs(draws.normal(size=(8, 9))) - 0.01
    logits = normal(3, 7, 4, seed=1)
    labels = torch.arange(7) % 4
    images = uniform(9, 1, 8, 8, seed=3)
    known = uniform(5, 1, 8, 8, seed=4)
    ways = [{}, {"offline": True}, {"pool_variance": False}, {"use_median": True}]
    return {
        "halves": members,
        "lira": [lira.lira_leave_one_out(seen, members, **way) for way in ways],
        "twice": [lira.lira_leave_one_out(twice, members, **way) for way in ways],
        "one": [lira.lira(seen[0], seen[1:], members[1:], **way) for way in ways],
        "rmia": [
            rmia.rmia_leave_one_out(logs, members, population),
            rmia.rmia(
                logs[0],
                logs[1:],
                members[1:],
                population[0],
                population[1:],
                offline=True,
                a=0.5,
                gamma=1.2,
            ),
        ],
        "loss": [loss.logit_scaled_confidence(logits, labels), loss.negative_loss(logits, labels)],
        "neighbours": list(search_nearest_neighbours(images, known, 3)),
        "calibrated": [
            nearest.calibrate_scores(seen[0], seen[1:]),
            nearest.calibrate_scores(seen[0], seen[1:], members[1:]),
        ],
        "cosine": nearest.score_largest_cosine(images, known),
    }


@golden("attack/searches")
def _searches(folder: Path) -> Values:
    """GAN-Leaks on a real generator, with few steps."""
    from privot.attacks.membership import gan_leaks
    from privot.nets import GENERATORS, initialize_weights
    from privot.release.artifact import Artifact

    arguments = {"shape": [1, 8, 8], "classes": 10, "latent_dim": 4, "hidden_dim": 8, "channels": 4}
    net = initialize_weights(GENERATORS["ConvGenerator"](**arguments), rng(0))
    product = Artifact.from_generator("ConvGenerator", arguments, net)
    drawn = product.build_generator()(normal(9, 4), torch.arange(9)).detach()
    images, labels = digits(5)
    return {
        "partial": gan_leaks.score_partial_black_box(
            product, images, labels, num_rounds=3, num_children=2
        ),
        "white": gan_leaks.score_white_box(
            product, images, labels, steps=3, restarts=2, lpips_weight=0
        ),
        "full": gan_leaks.score_full_black_box(images, drawn),
    }


@golden("attack/blind")
def _blind(folder: Path) -> Values:
    from privot.attacks.membership.blind_baseline import run_blind_baseline
    from privot.data.dataset import Records

    found = {}
    for name, factor in (("alike", 1.0), ("apart", 0.8)):
        images, labels = digits(60, 60)
        members = Records(*digits(60))
        found[name] = list(run_blind_baseline(members, Records(factor * images, labels), 10))
    return found


CANARIES = ("clean", "mislabelled", "blank", "noise", "scenes", "orthogonal")


@golden("attack/canaries", *CANARIES)
def _canaries(kind: str, folder: Path) -> Values:
    from privot.audit.canaries import IN_DISTRIBUTION_KINDS, flip_fair_coins, generate_canaries
    from privot.data.spec import Spec

    images, labels = digits(10)
    given = {"images": images, "labels": labels} if kind in IN_DISTRIBUTION_KINDS else {}
    made_of = [generate_canaries(kind, Spec((1, 8, 8), 10), 5, rng(4), **given)]
    if not given:
        made_of.append(generate_canaries(kind, Spec((3, 6, 5), 4), 3, rng(5)))
    return {"made": [list(each) for each in made_of], "coins": flip_fair_coins(20)}


@golden("attack/power")
def _power(folder: Path) -> Values:
    """The controls of one attack as they are, on digits."""
    from privot.attacks.membership.control_data import draw_mislabeled_digits, load_digit_splits
    from privot.attacks.membership.controls import compute_null_p_value, run_controls

    return {
        "power": numbers(run_controls.__wrapped__("nearest-pixels")),
        "digits": [list(each) for each in load_digit_splits(0)],
        "mislabelled": [list(each) for each in draw_mislabeled_digits(1)],
        "chance": [compute_null_p_value(*scores(), seed=seed) for seed in (0, 1)],
    }


def powerful(name: str) -> Any:
    """An attack's proof of power, taken as given."""
    from privot.attacks.membership.controls import ControlResult

    return ControlResult(name, 0.99, 0.5, 0.4, 0.9, True, "")


@golden("attack/attempt")
def _attempt(folder: Path) -> Values:
    """Whole attacks on releases, to the verdict."""
    from support.factories import make_release

    from privot.attacks.membership import checks, runner
    from privot.release import Release
    from privot.release.artifact import Artifact

    members = open_box(40)
    others = open_box(50, 40)
    rest = open_box(30, 90)
    images, labels = digits(40)
    claimed = make_release(classes=10, names=None)
    release = Release(
        Artifact.from_images(images, labels), claimed.guarantee, members.spec, claimed.metadata
    )
    noise = dataclasses.replace(
        release, artifact=Artifact.from_images(uniform(40, 1, 8, 8), labels)
    )
    sides = (members, others)
    more = {"runtime": cpu(), "options": runner.AttackOptions(epochs=2)}
    with mock.patch.object(checks, "run_controls", powerful):
        tried = {
            "nearest": runner.run_attack("real-start", release, *sides, references=[noise], **more),
            "tracing": runner.run_attack("tracing", release, *sides, population=rest, **more),
            "loss": runner.run_attack(
                "loss",
                noise,
                *sides,
                runtime=cpu(),
                options=runner.AttackOptions(epochs=2, num_candidates=20),
            ),
        }
    return {name: [numbers(each), numbers(each.to_json())] for name, each in tried.items()}


@golden("attack/shadows", "real-subset", "distribution-matching", "merf")
def _shadows(name: str, folder: Path) -> Values:
    """Shadows of a method, and LiRA with each of them as the victim."""
    from support.tiny_settings import choose_tiny_settings

    from privot.attacks.membership import checks, method_shadows, runner
    from privot.attacks.shadows.observe import OBSERVATIONS
    from privot.attacks.shadows.runner import prepare_shadows

    settings = {
        "real-subset": {"images_per_class": 1},
        "distribution-matching": {"images_per_class": 1, "steps": 2},
    }
    settings["distribution-matching"] |= {
        "batch_per_class": 8,
        "net_width": 4,
        "learning_rate": 1.0,
    }
    own = settings.get(name) or choose_tiny_settings(name)
    members = open_box(60)
    others = open_box(60, 60)
    more = {"seed": 3, "epochs": 1, "num_samples": 20, "shadows_per_batch": 3}
    shadows = method_shadows.shadows_for_method(
        name, own, None, members, others, folder / "shadows", 4, **more
    )
    prepared = prepare_shadows(shadows, cpu())
    with mock.patch.object(checks, "run_controls", powerful):
        found = runner.leave_one_out_attack("lira-pixels", prepared)
    return {
        "members": prepared.load_membership(),
        "observed": [np.array(prepared.load_observation(each)) for each in OBSERVATIONS],
        "facts": [prepared.load_fact(each) for each in ("records", "accuracy_in", "accuracy_out")],
        "releases": [
            bag(prepared.load_release(each).artifact.tensors.values()) for each in range(4)
        ],
        "left out": numbers(found),
    }


AUDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "runs": ("merf", {"epsilon": 5.0, "runs_per_side": 4}),
    "gaussian": (
        "merf",
        {
            "epsilon": 5.0,
            "runs_per_side": 4,
            "assume_gaussian": True,
            "canary_kind": "mislabelled",
            "canary_score": "nearest",
        },
    ),
    "canaries": ("merf", {"epsilon": 5.0, "num_canaries": 6, "canary_kind": "orthogonal"}),
    "open": ("real-subset", {"runs_per_side": 4, "canary_kind": "clean"}),
}


@golden("attack/epsilon", *AUDITS)
def _epsilon(label: str, folder: Path) -> Values:
    """The lower bound on epsilon by runs with and without planted records."""
    from privot.audit.runner import EpsilonAudit

    name, more = AUDITS[label]
    quick = {
        "num_features": 16,
        "steps": 2,
        "batch_per_class": 4,
        "hidden_dim": 8,
        "neighbours": "add-remove",
    }
    settings = quick if name == "merf" else {"images_per_class": 2}
    box = open_box(60)
    audit = EpsilonAudit(
        folder=folder / "audit", dataset=box, method=name, settings=settings, **more
    )
    verdict = audit.run(cpu())
    text = (folder / "audit" / "runs.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return {"verdict": numbers(verdict), "runs": numbers(lines)}


# Gradient inversion


def victims(count: int = 2, batch: int = 1, **more: Any) -> tuple[Any, Tensor, Tensor]:
    """Updates of fresh LeNets on digits, and the images and labels behind them."""
    from privot.attacks.inversion.models import LENET_INIT_BOUND, lenet, sample_initial_weights
    from privot.attacks.inversion.problem import Problem

    images, labels = digits(count * batch)
    images = images.unflatten(0, (count, batch))
    labels = labels.unflatten(0, (count, batch))
    net = lenet((1, 8, 8), 10)
    weights = sample_initial_weights(net, count, rng(3), LENET_INIT_BOUND)
    return (
        Problem.from_images(net, nn.functional.cross_entropy, images, labels, weights, **more),
        images,
        labels,
    )


def shortened(name: str, steps: int = 4) -> Any:
    """A named attack with so many steps in each phase."""
    from privot.attacks.inversion.attacks import INVERSION_ATTACKS

    phases = tuple(
        dataclasses.replace(each, steps=steps) for each in INVERSION_ATTACKS[name].phases
    )
    return dataclasses.replace(INVERSION_ATTACKS[name], phases=phases)


INVERSION = (
    "dlg",
    "idlg",
    "wdlg",
    "wdlg-layer",
    "wdlg-l1",
    "wdlg-index",
    "wdlg-sliced",
    "wdlg-sorted",
    "wdlg-critic",
    "cosine",
    "hybrid",
)


def found_images(found: Any) -> list[Any]:
    trace = [[step, images] for step, images in found.trace or ()]
    return [found.images, found.labels, found.steps, found.residual, trace]


@golden("inversion", *INVERSION)
def _inversion(name: str, folder: Path) -> Values:
    from privot.attacks.inversion import invert

    problem, *_ = victims()
    return {"found": found_images(invert(problem, shortened(name), restarts=1, trace_steps=(1, 3)))}


@golden("inversion/optimisers")
def _optimisers(folder: Path) -> Values:
    from privot.attacks.inversion import invert

    problem, _, labels = victims(3, 2)
    attack = shortened("wdlg", 5)
    ways = {
        "adam": attack.replace_optimizer("adam", 5),
        "search": attack.replace_optimizer("lbfgs-search", 5, 0.5),
    }
    found = {name: found_images(invert(problem, way, labels=labels)) for name, way in ways.items()}
    return {
        **found,
        "portions": found_images(
            invert(problem, attack, labels=labels, chunk_size=2, trace_steps=(2,))
        ),
    }


@golden("inversion/objectives")
def _objectives(folder: Path) -> Values:
    from privot.attacks.inversion.objectives import OBJECTIVES, compute_total_variation

    one = {"a": normal(4, 3, 2, seed=1).requires_grad_(), "b": normal(4, seed=2).requires_grad_()}
    two = {"a": normal(4, 3, 2, seed=3), "b": normal(4, seed=4)}
    found = {}
    for place, each in enumerate(OBJECTIVES.values()):
        loss = each.distance(one, two)
        found[f"{place}"] = [
            loss,
            each.residual(one, two),
            *torch.autograd.grad(loss, list(one.values())),
        ]
    return {**found, "variation": compute_total_variation(uniform(2, 5, 5))}


@golden("inversion/closed-form")
def _closed_form(folder: Path) -> Values:
    from privot.attacks.inversion.models import cnn6, compute_logistic_loss, sample_initial_weights
    from privot.attacks.inversion.problem import Problem
    from privot.attacks.inversion.rgap import reconstruct_by_rgap

    problem, *_ = victims()
    images, labels = digits(2)
    net = cnn6((1, 8, 8)).double()
    weights = {name: each.double() for name, each in sample_initial_weights(net, 2, rng(1)).items()}
    other = Problem.from_images(
        net, compute_logistic_loss, images.double()[:, None], labels[:, None] % 2, weights
    )
    return {
        "lenet": found_images(reconstruct_by_rgap(problem)),
        "cnn6": found_images(reconstruct_by_rgap(other)),
    }


@golden("inversion/relu-batch")
def _relu_batch(folder: Path) -> Values:
    from privot.attacks.inversion import spear
    from privot.attacks.inversion.models import sample_initial_weights
    from privot.attacks.inversion.problem import Problem

    images, labels = digits(3)
    images = images.double()
    loss = nn.functional.cross_entropy
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10)).double()
    weights = {
        name: each[0].double() for name, each in sample_initial_weights(net, 1, rng(2)).items()
    }
    problem = Problem.from_images(net, loss, images[None], labels[None], weights)
    found = spear.reconstruct_by_spear(problem, max_rounds=2)
    return {"found": [about(found.images), found.labels, found.steps, found.residual]}


@golden("inversion/labels")
def _labels(folder: Path) -> Values:
    from privot.attacks.inversion.labels import (
        compute_mean_logit_gradient,
        find_last_linear,
        recover_labels,
    )
    from privot.attacks.inversion.models import sample_initial_weights
    from privot.attacks.inversion.problem import Problem

    images, labels = digits(8)
    found = {"one": recover_labels(victims(4)[0]), "many": recover_labels(victims(2, 4)[0])}
    for name, bias in (("with", True), ("without", False)):
        last = nn.Linear(9, 10, bias=bias)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Sigmoid(), last)
        weights = {key: each[0] for key, each in sample_initial_weights(net, 1, rng(2)).items()}
        problem = Problem.from_images(
            net, nn.functional.cross_entropy, images[None], labels[None], weights
        )
        errors = compute_mean_logit_gradient(problem, *find_last_linear(net, 10))
        found[name] = [recover_labels(problem), errors]
    return found


@golden("inversion/certificate")
def _certificate(folder: Path) -> Values:
    from privot.attacks.inversion import compute_cramer_rao_bound
    from privot.attacks.inversion.box_least_squares import solve_box_least_squares
    from privot.attacks.inversion.defenses import ClippingDefense, PruningDefense

    problem, images, labels = victims()
    found = {}
    for name, defence in (
        ("plain", None),
        ("clipped", ClippingDefense(0.5, 1.0)),
        ("pruned", PruningDefense(0.5)),
    ):
        sure = compute_cramer_rao_bound(problem, images, labels, defence)
        found[name] = [
            sure.eigenvalues,
            sure.variance,
            sure.null_space_fraction,
            sure.unit_noise_errors,
            sure.null_space_error,
            sure.rank,
        ]
        found[f"{name} errors"] = [
            sure.predict_mse(0.01),
            sure.predict_psnr(0.1),
            sure.predict_unbiased_mse(0.1),
            sure.find_noise_std(15),
        ]
    square = normal(2, 6, 6, seed=1)
    return {
        **found,
        "boxed": solve_box_least_squares(square @ square.mT, normal(2, 6, 3, seed=2), (0.0, 1.0)),
    }


@golden("inversion/defences")
def _defences(folder: Path) -> Values:
    from privot.attacks.inversion import defenses

    each = {"a": normal(2, 3, 4, 5, seed=1), "b": normal(2, 3, 4, seed=2)}
    ways = {
        "noise": defenses.build_defense(noise_scale=0.1),
        "clipped": defenses.build_defense(noise_scale=0.5, clip_norm=1.0, batch_size=3),
        "pruned": defenses.build_defense(prune_fraction=0.6),
        "rounded": defenses.build_defense(bits=4),
        "signs": defenses.build_defense(bits=1),
        "several": defenses.build_defense(
            noise_scale=0.5, clip_norm=2.0, prune_fraction=0.3, bits=6, batch_size=3
        ),
    }
    found: Values = {}
    for name, way in ways.items():
        sent = [way(each, rng(3)), way(each), way.apply_without_noise(each)]
        found[name] = [[list(update.values()) for update in sent], way.noise_std]
    for name in ("pruned", "rounded"):
        problem, *_ = victims(defense=ways[name])
        found[f"{name} slack"] = list(ways[name].adapt_problem(problem).slack.values())
    firsts = {name: part[:, 0] for name, part in each.items()}
    found["spread"] = list(ways["rounded"].compute_rounding_std(firsts).values())
    return found


@golden("inversion/promises")
def _promises(folder: Path) -> Values:
    from privot.attacks.inversion.defense_guarantee import DpSgdRun, derive_defense_guarantee
    from privot.attacks.inversion.defenses import ClippingDefense

    with coarse_accounting():
        return {
            "clipped": numbers(
                derive_defense_guarantee(ClippingDefense(1.0, 1.5), DpSgdRun(1000, 50, 20))
            )
        }


@golden("inversion/refining")
def _refining(folder: Path) -> Values:
    from privot.attacks.inversion.defenses import NoiseDefense
    from privot.attacks.inversion.gauss_newton import refine_by_gauss_newton
    from privot.attacks.inversion.problem import Reconstruction

    problem, images, labels = victims(defense=NoiseDefense(1e-3), generator=rng(4))
    near = (images + 0.05 * normal(*images.shape)).clamp(0, 1)
    start = Reconstruction(near, labels, torch.ones(2, dtype=torch.long), torch.ones(2))
    return {"refined": found_images(refine_by_gauss_newton(problem, start, steps=1))}


@golden("inversion/judging")
def _judging(folder: Path) -> Values:
    from privot.attacks.inversion import score_reconstruction
    from privot.attacks.inversion.problem import Reconstruction
    from privot.attacks.inversion.scoring import compute_label_overlap, match_images

    images, labels = digits(6)
    truth = images.unflatten(0, (2, 3))
    own = labels.unflatten(0, (2, 3))
    guess = truth.flip(1) + 0.1 * normal(*truth.shape)
    found = score_reconstruction(
        Reconstruction(guess, own.flip(1), torch.ones(2), torch.ones(2)), truth, own, 0.02
    )
    return {
        "judged": [
            found.mse,
            found.nearest_mse,
            found.psnr,
            found.ssim,
            found.label_accuracy,
            found.matching,
        ],
        "rates": [found.leak_rate, found.leak_rate_low, found.leak_rate_high],
        "json": numbers(found.to_json()),
        "matched": match_images(uniform(3, 4, 4)),
        "overlap": compute_label_overlap(torch.tensor([[3, 3, 5]]), torch.tensor([[5, 3, 4]])),
    }


@golden("inversion/audit")
def _inversion_audit(folder: Path) -> Values:
    """All tiers on an update of a model of one's own: as it is, and with noise."""
    from privot.attacks.inversion import check_leakage
    from privot.nets import initialize_weights

    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(256, 10)]
    net = initialize_weights(nn.Sequential(*layers), rng(1))
    batch = digits(1)
    loss = nn.functional.cross_entropy
    slopes = torch.autograd.grad(loss(net(batch[0]), batch[1]), list(net.parameters()))
    names = [name for name, _ in net.named_parameters()]
    found = {}
    for label, noise in (("plain", 0.0), ("noisy", 1e-3)):
        sent = [2 * each + noise * normal(*each.shape, seed=7) for each in slopes]
        update = dict(zip(names, sent, strict=True))
        more = {
            "attack": shortened("hybrid"),
            "restarts": 0,
            "target_psnrs": (15,),
            "is_defended": bool(noise),
        }
        seen = check_leakage(net, loss, batch, update, **more)
        tiers = [[tier.mse, tier.psnr] for tier in seen.tiers]
        found[label] = [
            seen.gradient_cosine,
            seen.gradient_scale,
            seen.noise_std,
            seen.label_accuracy,
            tiers,
            seen.images,
            numbers(seen.noise_std_for_psnr),
        ]
    return found


@golden("inversion/experiment")
def _experiment(folder: Path) -> Values:
    from privot.attacks.inversion.defense_guarantee import DpSgdRun
    from privot.attacks.inversion.experiment import InversionExperiment

    found = {}
    ways = {
        "plain": {"attack": "idlg", "num_checked": 1},
        "defended": {
            "attack": "wdlg",
            "noise_scale": 0.1,
            "clip_norm": 1.0,
            "bits": 8,
            "training": DpSgdRun(1000, 50, 20),
        },
        "cnn6": {"model": "cnn6", "attack": "hybrid", "optimizer": "adam"},
        "batch": {"attack": "dlg", "batch_size": 2, "prune_fraction": 0.3},
    }
    for name, way in ways.items():
        experiment = InversionExperiment(**{"num_victims": 2, "steps": 3, "num_checked": 0, **way})
        with coarse_accounting():
            seen = experiment.run(open_box(30), cpu())
            told = seen.to_json()
        told["tiers"]["search"] = told["tiers"]["search"] | {"seconds": 0.0}
        found[name] = [found_images(seen.reconstruction), numbers(told), seen.stack_snapshots()]
    return found


@golden("inversion/wire")
def _wire(folder: Path) -> Values:
    """What the record of a federated run tells of an owner's images."""
    from support.federation import ROOMY, play, serving, terms

    from privot.attacks.inversion.transcript import read_client_transcript
    from privot.attacks.inversion.transcript_attack import TranscriptAttack
    from privot.data.dataset import Sensitive
    from privot.data.spec import Spec
    from privot.federated import Client
    from privot.privacy.ledger import Ledger

    images, labels = digits(12)
    box = Sensitive(images.numpy(), labels.numpy(), Spec((1, 8, 8), 10), name="ward 0")
    agreed = terms(owners=1, rounds=2, records_per_critic=6)
    server = serving(agreed, ["ward 0"], transcript_path=folder / "wire")
    owner = Client(box, ROOMY, Ledger(folder / "ward.jsonl"), folder / "run", cpu())
    play(server, {"ward 0": owner})
    heard = read_client_transcript(folder / "wire")
    attack = shortened("idlg").replace_optimizer("adam", 4)  # L-BFGS would get its full steps there
    wire = TranscriptAttack(num_images=6, num_simulated_clients=5, num_checked=1, attack=attack)
    found = wire.run(heard, box, open_box(60, 30), cpu())
    return {
        "heard": [heard.images, heard.values, len(heard.values)],
        "pictures": list(found.reconstructions.values()),
        "tiers": numbers(found.tiers),
        "gain": found.psnr_gain,
    }


# Measures


def readings(found: Iterable[Any]) -> list[Any]:
    """Numbers of readings, without the seconds."""
    return [
        [
            each.value,
            each.standard_error,
            each.num_samples,
            each.reference_size,
            each.publishable,
        ]
        for each in found
    ]


def subject(count: int = 60, soft: bool = False) -> Any:
    from privot.measures import Samples

    images, labels = digits(count)
    shares = nn.functional.one_hot(labels, 10).float() * 0.9 + 0.01 if soft else None
    return Samples(
        "some",
        (images + 0.1 * normal(*images.shape)).clamp(0, 1),
        labels,
        10,
        publishable=True,
        soft_labels=shares,
    )


CLASSICAL = (
    "logistic",
    "random_forest",
    "gaussian_nb",
    "bernoulli_nb",
    "linear_svc",
    "decision_tree",
    "lda",
    "adaboost",
    "mlp",
    "bagging",
    "gbm",
    "xgboost",
)
NETWORKS = ("cnn", "convnet", "resnet")


@contextlib.contextmanager
def brief_networks() -> Iterator[None]:
    """One epoch for each network that measures."""
    module = importlib.import_module("privot.measures.downstream")
    short = {
        name: (
            build,
            dataclasses.replace(
                recipe, epochs=1, lr_milestones=(), num_repeats=min(2, recipe.num_repeats)
            ),
        )
        for name, (build, recipe) in module.DOWNSTREAM_NETWORKS.items()
    }
    with mock.patch.dict(module.DOWNSTREAM_NETWORKS, short):
        yield


@golden("measure/classical", *CLASSICAL)
def _classical(name: str, folder: Path) -> Values:
    from privot.data.dataset import Records
    from privot.measures.classical import fit_predict

    images, labels = digits(60)
    return {"guesses": fit_predict(name, Records(images, labels), digits(100, 60)[0], 10, 3)}


@golden("measure/network", *NETWORKS)
def _network(name: str, folder: Path) -> Values:
    from privot.measures.evaluator import measure

    with brief_networks():
        more = {"runtime": cpu(), "seed": 2}
        test = open_box(50, 60)
        subjects = [subject(20, soft) for soft in (False, True)]
        found = [measure(each, test, [name], **more) for each in subjects]
    return {"readings": [readings(each) for each in found]}


@golden("measure/thirteen")
def _thirteen(folder: Path) -> Values:
    """The mean over the classifiers, and the one beside real data."""
    from privot.measures.evaluator import measure

    few = {"linear_svc": {"max_iter": 20}, "mlp": {"max_iter": 5}, "gbm": {"n_estimators": 3}}
    module = importlib.import_module("privot.measures.classical")
    known = dict(module.CLASSICAL_CLASSIFIERS)

    def short(seed: int, name: str) -> Any:
        return known[name](seed).set_params(**few[name])

    quick = {name: functools.partial(short, name=name) for name in few}
    with brief_networks(), mock.patch.dict(module.CLASSICAL_CLASSIFIERS, quick):
        test = open_box(100, 60)
        ceiling = measure(subject(40), test, ["gs_wgan"], runtime=cpu())
        found = measure(
            subject(30), test, ["gs_wgan"], real_data_results=ceiling, runtime=cpu(), seed=1
        )
    return {"ceiling": readings(ceiling), "readings": readings(found)}


@golden("measure/suite")
def _suite(folder: Path) -> Values:
    """All that compares images, by a stand-in for the network of FID and by a small network."""
    reference = importlib.import_module("privot.measures.reference")
    score = importlib.import_module("privot.measures.inception_score")
    from privot.measures.evaluator import Evaluator
    from privot.measures.feature_extractors import FeatureExtractor
    from privot.nets.classifiers.convnet import ConvNet
    from privot.nets.training import Recipe

    def features(images: Tensor, progress: Any) -> Tensor:
        return images.flatten(1)[:, 20:28]

    ruler = FeatureExtractor(
        "",
        "eight pixels",
        True,
        features,
        lambda images, progress: features(images, progress).softmax(1),
    )
    names = ["fid", "kid", "precision", "domain", "is", "imagenet_is", "sliced", "exact"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_weights())
        stack.enter_context(
            mock.patch.object(reference, "load_inception_extractor", return_value=ruler)
        )
        stack.enter_context(mock.patch.object(score, "SCORE_CLASSIFIER_RECIPE", Recipe(1, 0.01)))
        small = functools.partial(ConvNet, width=4, depth=1)
        stack.enter_context(mock.patch.object(score, "VGG11", small))
        bench = Evaluator(open_box(90, 60), open_box(80, 150), runtime=cpu(), seed=1)
        found = bench.measure(subject(50), names)
    return {"readings": [readings([each])[0] for each in found]}


@golden("measure/distances")
def _distances(folder: Path) -> Values:
    from privot.measures.fid_kid import frechet_distance, kernel_distance
    from privot.measures.precision_recall import precision_recall
    from privot.measures.wasserstein import exact_wasserstein, sliced_wasserstein

    score = importlib.import_module("privot.measures.inception_score")
    real = normal(60, 5, seed=1)
    fake = 1.2 * normal(50, 5, seed=2) + 0.3
    return {
        "frechet": list(frechet_distance(real, fake, rng(1))),
        "kernel": list(kernel_distance(real, fake, rng(2), num_subsets=10, subset_size=20)),
        "quality": [list(precision_recall(real, fake, k)) for k in (1, 3)],
        "sliced": [list(sliced_wasserstein(real, fake, 20, rng(3), p)) for p in (1, 2)],
        "exact": list(exact_wasserstein(real, fake)),
        "score": list(score.inception_score(normal(60, 4, seed=5).softmax(1), rng(4))),
    }


@golden("measure/similarity")
def _similarity(folder: Path) -> Values:
    similarity = importlib.import_module("privot.measures.image_similarity")

    images, _ = digits(4)
    other = (images + 0.2 * normal(*images.shape)).clamp(0, 1)
    wide = uniform(2, 3, 20, 17), uniform(2, 3, 20, 17, seed=1)
    plain = (similarity.mse, similarity.l2, similarity.psnr, similarity.ssim)
    with mock.patch.object(similarity, "load_lpips_network", random_lpips):
        perceptual = similarity.lpips(images, other)
    return {
        "plain": [each(*pair) for each in plain for pair in ((images, other), wide)],
        "lpips": perceptual,
    }


@golden("measure/boosting")
def _boosting(folder: Path) -> Values:
    from privot.measures.adaboost import HistogramAdaBoost

    images, labels = digits(40)
    made_of = HistogramAdaBoost(15).fit(images.flatten(1).numpy(), labels.numpy())
    return {
        "stumps": [list(each) for each in made_of.stumps_],
        "guesses": made_of.predict(images.flatten(1).numpy()),
    }


# Reports


def shown(path: Path) -> Values:
    """Pictures and curves in a page; its words are left out."""
    from PIL import Image

    html = path.read_text()
    encoded = [base64.b64decode(each) for each in re.findall(r"base64,([\w+/=]+)", html)]
    pictures = [np.asarray(Image.open(io.BytesIO(each))) for each in encoded]
    charts = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    drawn = [re.findall(r' (?:d|cx|cy|r|x1|x2|y1|y2)="([^"]*)"', each) for each in charts]
    return {
        "pictures": pictures,
        "curves": [[numbers_of_path(each) for each in chart] for chart in drawn],
    }


def numbers_of_path(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", text)]


def plain_text(path: Path) -> Any:
    return json.loads(path.read_text())


@golden("report")
def _report(folder: Path) -> Values:
    from support.factories import (
        NO_GUARANTEE,
        internal_folder,
        make_attack_result,
        make_metric_result,
        make_noise_dataset,
        make_release,
    )

    from privot.privacy.ledger import Ledger
    from privot.privacy.plan import Budget
    from privot.report import OwnerInputs, write_report

    context = importlib.import_module("privot.report.context")
    found: Values = {}
    # The number of the format of releases stands in a report; it is no result.
    with coarse_accounting(), no_weights(), mock.patch.object(context, "RELEASE_FORMAT", 1):
        book = Ledger(folder / "book.jsonl")
        book.set_limit(Budget(20.0))
        book.reserve(plans()["gaussian"], "some")
        releases = {
            "proved": make_release(),
            "none": make_release(claim=NO_GUARANTEE),
            "sampled": make_release(plans()["poisson"], each=2),
        }
        for name, release in releases.items():
            more = {
                "results": [
                    make_metric_result(),
                    make_metric_result("fid", 30.0, better="lower"),
                    make_metric_result("is", 8.0, publishable=False),
                ],
                "attacks": [make_attack_result(), make_attack_result("other", publishable=False)],
                "owner_inputs": OwnerInputs(make_noise_dataset(1), book),
            }
            out = folder / name
            written = write_report(release, out, name=name, **more)
            found[name] = numbers(plain_text(out / "report.json"))
            found[f"{name} page"] = list(shown(out / "report.html").values())
            found[f"{name} inside"] = numbers(plain_text(internal_folder(out) / "internal.json"))
            found[f"{name} owner's page"] = list(
                shown(internal_folder(out) / "internal.html").values()
            )
            found[f"{name} written"] = [
                len(written.paths),
                written.guarantee_refuted,
                written.num_left_out,
            ]
        above = write_report(
            make_release(),
            folder / "above",
            name="above",
            attacks=[make_attack_result(tpr=(0.9, 0.95), lower=(0.8, 0.9))],
        )
        found["above"] = [
            above.guarantee_refuted,
            numbers(plain_text(folder / "above" / "report.json")),
        ]
    return found


@golden("report/compare")
def _compare(folder: Path) -> Values:
    from support.factories import NO_GUARANTEE, make_metric_result, make_release

    from privot.measures import Samples
    from privot.report.comparison import compare

    subjects = [
        (
            Samples.from_release(make_release(), "one", 12),
            [make_metric_result(), make_metric_result("fid", 20.0, better="lower")],
        ),
        (
            Samples.from_release(make_release(claim=NO_GUARANTEE), "two", 7, seed=1),
            [make_metric_result(value=0.95), make_metric_result("kid", 0.1, num_samples=5)],
        ),
        (
            Samples("three", uniform(9, 1, 8, 8), torch.arange(9) % 3, 3),
            [make_metric_result(value=0.5, publishable=False)],
        ),
    ]
    page = compare(subjects, folder / "out")
    return {
        "numbers": numbers(plain_text(page.with_name("comparison.json"))),
        "page": list(shown(page).values()),
    }


@golden("report/statement")
def _statement(folder: Path) -> Values:
    """The numbers in the words of the promise."""
    from privot.data.spec import Spec
    from privot.privacy.guarantee import Guarantee
    from privot.report.statement import build_statement, format_guarantee

    found = {}
    for name in ("gaussian", "client", "laplace", "response"):
        claim = Guarantee.from_plan(plans()[name], 1e-6)
        words = build_statement(claim, Spec((1, 8, 8), 3, 60, (20, 20, 20)))
        found[name] = [
            sorted(numbers_in(" ".join(words["promise"]))),
            numbers_in(format_guarantee(claim)),
        ]
    return found


# Federations


@golden("federated/run")
def _federated(folder: Path) -> Values:
    """Three owners and a server in one process: what is sent, released and charged."""
    from support.federation import play, serving, terms, wards

    from privot.federated import Answer, Request, unpack_message
    from privot.federated.transcript import read_transcript

    agreed = terms(rounds=2)
    everyone = wards(folder)
    server = serving(agreed, everyone, transcript_path=folder / "wire")
    release = play(server, everyone)
    messages = [unpack_message(each.message) for each in read_transcript(folder / "wire")]
    plan = agreed.plan()
    return {
        "tensors": bag(release.artifact.tensors.values()),
        "samples": release.sample(10),
        "guarantee": numbers(release.guarantee),
        "requests": [each.images for each in messages if isinstance(each, Request)],
        "answers": [each.gradients for each in messages if isinstance(each, Answer)],
        "charges": [numbers(each.ledger.entries()) for each in everyone.values()],
        "spent": [each.spent() for each in everyone.values()],
        "plan": [[stage.noise_multiplier, stage.steps] for stage in plan.stages],
    }


@golden("federated/dropout")
def _dropout(folder: Path) -> Values:
    """Rounds ask two owners of three, and one of them never answers."""
    from support.federation import consent, serving, terms, wards

    agreed = terms(rounds=4, clients_per_round=2)
    everyone = wards(folder)
    server = serving(agreed, everyone)
    consent(server, everyone)
    asked = []
    while not server.is_finished:
        requests = server.pack_requests()
        asked.append(len(requests))
        for name, request in requests.items():
            if name != "ward 1":
                server.receive(name, everyone[name].reply(request))
        server.end_round()
    release = server.build_release()
    tensors = bag(release.artifact.tensors.values())
    return {"asked": asked, "tensors": tensors, "samples": release.sample(10)}


@golden("federated/messages")
def _messages(folder: Path) -> Values:
    """The tensors in packed messages to the byte, and whether each comes back as it was."""
    from support.federation import RUN, images, plausible, terms

    from privot.federated import Refusal, Request, pack_message, unpack_message

    agreed = terms()
    messages = [
        agreed,
        Request(RUN, 3, images(agreed)),
        plausible(agreed, 2),
        Refusal(RUN, -1, "no"),
    ]
    packed = [pack_message(each) for each in messages]
    bodies = [raw[8 + int.from_bytes(raw[:8], "little") :] for raw in packed]
    again = unpack_message(packed[0])
    stated = [*again.shape, again.num_classes, again.num_clients, *numbers(again.settings)]
    return {
        "bodies": bodies,
        "again": [pack_message(unpack_message(raw)) == raw for raw in packed],
        "terms": stated,
        "answer": unpack_message(packed[2]).gradients,
    }


# Whether all is there


# name -> module, what it lists there, the label of the runs, and their items
LISTED: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "methods": ("privot.methods", "list_methods", "method", METHODS),
    "channels": ("privot.local.channels", "CHANNELS", "channel", CHANNELS),
    "membership attacks": ("privot.attacks.membership.registry", "ATTACKS", "attack", MEMBERSHIP),
    "inversion attacks": (
        "privot.attacks.inversion.attacks",
        "INVERSION_ATTACKS",
        "inversion",
        INVERSION,
    ),
    "canaries": ("privot.audit.canaries", "CANARY_KINDS", "attack/canaries", CANARIES),
    "generators": ("privot.nets", "GENERATORS", "net", GENERATORS),
    "classical classifiers": (
        "privot.measures.classical",
        "CLASSICAL_CLASSIFIERS",
        "measure/classical",
        CLASSICAL,
    ),
    "networks": (
        "privot.measures.downstream_networks",
        "DOWNSTREAM_NETWORKS",
        "measure/network",
        NETWORKS,
    ),
}


def not_covered(name: str) -> set[str]:
    """What the package lists and no run here covers."""
    module, attribute, label, items = LISTED[name]
    listed = getattr(importlib.import_module(module), attribute)
    covered = {RENAMED.get(f"{label}/{item}", item) for item in items}
    return set(listed() if callable(listed) else listed) - covered


def main() -> int:
    parser = argparse.ArgumentParser(description="Compute the digests of all runs.")
    parser.add_argument("--write", action="store_true", help="store them in digests.json")
    parser.add_argument("--only", default="", help="runs whose label contains this word")
    parser.add_argument("--times", action="store_true", help="print the seconds of each run")
    given = parser.parse_args()
    stored: Any = {"fingerprint": {}, "digests": {}}
    if STORED.exists():
        stored = json.loads(STORED.read_text())
    here = fingerprint()
    begin = time.perf_counter()
    found: dict[str, dict[str, str]] = {}
    differ = []
    for label in (each for each in RUNS if given.only in each):
        start = time.perf_counter()
        try:
            found[label] = compute(label)
        except Exception as error:
            if given.write:
                raise
            differ.append(f"{label}: {type(error).__name__}: {error}")
            continue
        if changed := changes(found[label], stored["digests"].get(label, {})):
            differ.append(f"{label}: {', '.join(changed)}")
        if given.times:
            print(f"{time.perf_counter() - start:7.2f} s  {label}", flush=True)
    count = sum(map(len, found.values()))
    print(f"{len(found)} runs, {count} digests, {time.perf_counter() - begin:.0f} s")
    if not given.write:
        if stored["fingerprint"] != here:
            print("the stored digests were taken elsewhere")
        print("\n".join([f"{len(differ)} runs differ", *differ]))
        return int(bool(differ))
    kept = stored["digests"] if given.only else {}
    if kept and stored["fingerprint"] != here:
        print("the stored digests were taken elsewhere: write all of them")
        return 1
    digests = {label: each for label, each in (kept | found).items() if label in RUNS}
    STORED.write_text(json.dumps({"fingerprint": here, "digests": digests}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
