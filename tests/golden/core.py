"""Registering runs, digests of values, and surroundings in which a run is deterministic."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import os
import random
import re
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import scipy.linalg
import scipy.special
import sklearn.linear_model  # noqa: F401 (its libraries must be loaded when threads are limited)
import torch
import torch.distributed._composable  # draws random bytes when it is first imported
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from privot.runtime import Runtime

CPU = Runtime("cpu")
RUNS = {}

# name that a thing has now -> the name in the label of its run, where that is an older one
OLD_NAMES = {
    "AutoencoderGenerator": "DecodedGenerator",
    "ConvAutoencoderGenerator": "ConvDecodedGenerator",
    "DcganGenerator": "DeepConvGenerator",
    "TabularGenerator": "RecordGenerator",
    "composite": "mixed",
    "dead-leaves": "scenes",
}


def golden(label, items=None):
    """Register a run: a function of a folder, or of a name and a folder with names given.

    It returns a dictionary of values, or yields pairs of a name and a value.
    """

    def register(function):
        if items is None:
            RUNS[label] = function
        for item in items or ():
            RUNS[f"{label}/{OLD_NAMES.get(item, item)}"] = functools.partial(function, item)
        return function

    return register


def compute(label):
    """The digests of one run, by the names of its values."""
    with isolate(label) as folder:
        return {name: digest(value) for name, value in dict(RUNS[label](folder)).items()}


# Digests


def digest(value):
    """SHA-256 of tensors, arrays, numbers, bytes, and lists of such."""
    state = hashlib.sha256()
    feed(state.update, value)
    return state.hexdigest()


def feed(update, value):
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        update(f"tensor {value.dtype} {list(value.shape)};".encode())
        update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (bool, int, float, np.number, np.bool_)):
        update(f"{format_number(value)};".encode())
    elif isinstance(value, bytes):
        update(f"bytes {len(value)};".encode() + value)
    elif isinstance(value, (list, tuple)):
        update(f"list {len(value)};".encode())
        for item in value:
            feed(update, item)
    elif value is None:
        update(b"none;")
    else:
        raise TypeError(f"{type(value).__name__} is not digested: no names, no words")


def format_number(value):
    """A number in 12 significant digits.

    >>> format_number(0.1 + 0.2), format_number(3)
    ('0.3', '3.0')
    """
    return repr(float(f"{float(value):.12g}"))


def numbers(value):
    """The numbers in JSON, dataclasses and lists, by their position; keys and words are left out.

    >>> numbers({"a": [1, "two"], "b": {"c": 0.5}, "d": True})
    [1, 0.5, True]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (bool, int, float, np.number, np.bool_)) else []


def numbers_in(text):
    """The numbers in a text, in their order.

    >>> numbers_in("epsilon 1.5 at 1e-5, 1,438 records")
    [1.5, 1e-05, 1438.0]
    """
    matches = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text.replace(", ", " ; "))
    return [float(match.rstrip(",").replace(",", "")) for match in matches]


def bag(values):
    """Values in no order, for dictionaries whose keys may be renamed and sorted."""
    return sorted(digest(value).encode() for value in values)


def tensors_of(release):
    return bag(release.artifact.tensors.values())


# Surroundings


PACKAGES = "torch numpy scipy scikit-learn dp-accounting torchmetrics POT xgboost-cpu pillow"


def fingerprint():
    """What the bits of a result depend on: versions, and a digest of typical computations."""
    versions = {name: get_version(name) for name in PACKAGES.split()}
    return {**versions, "cpu": torch.backends.cpu.get_cpu_capability(), "probe": probe()}


def get_version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def probe():
    """The digest of convolutions, products, decompositions and sorts of fixed numbers."""
    with isolate("probe"):
        return digest(list(compute_probe(torch.Generator().manual_seed(0))))


def compute_probe(draws):
    for channels, width, side in ((1, 4, 8), (3, 16, 8), (16, 32, 12), (64, 64, 4)):
        images = torch.randn(5, channels, side, side, generator=draws, requires_grad=True)
        weights = torch.randn(width, channels, 3, 3, generator=draws, requires_grad=True)
        maps = nn.functional.conv2d(images, weights, padding=1)
        yield from (maps, *torch.autograd.grad(maps.square().sum(), (images, weights)))
    for dtype in (torch.float32, torch.float64):
        for size in (3, 17, 64, 150):
            left, right = torch.randn(2, 2, size, size, generator=draws, dtype=dtype)
            square = left @ left.mT / size + torch.eye(size, dtype=dtype)
            yield from (left @ right, left[0] @ right[0, 0])
            yield from (torch.linalg.eigh(square)[0], torch.linalg.inv(square))
            yield from (torch.linalg.qr(left)[0], torch.linalg.svdvals(right))
            yield torch.linalg.cholesky(square)
        flat = torch.randn(1001, generator=draws, dtype=dtype)
        yield from (flat.exp(), flat.abs().log(), flat.tanh(), flat.sigmoid(), flat.cos())
        yield from (flat.sum(), flat.std(), flat.logsumexp(0), flat.softmax(0))
        yield from (flat.sort().values, flat.argsort(), flat.cumsum(0), flat.erf())
        array = flat.numpy()
        yield from (array @ array, np.exp(array), np.log1p(np.abs(array)), array.sum())
        yield np.sort(array)
    array = np.linspace(-3, 3, 200).reshape(10, 20)
    yield from (scipy.special.ndtr(array), scipy.special.betaincinv(2.0, 5.0, (array + 3) / 6))
    yield from (scipy.linalg.svdvals(array), np.linalg.solve(array @ array.T + np.eye(10), array))


@contextlib.contextmanager
def isolate(label):
    """Within, chance follows from the label, one thread computes, and no user's file is touched."""
    calls = itertools.count()

    def urandom(size):
        return hashlib.shake_256(f"{label} {next(calls)}".encode()).digest(size)

    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "little")
    threads = torch.get_num_threads()
    states = (np.random.get_state(), random.getstate())
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="golden-")))
        names = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
        paths = {name: str(folder / "nowhere") for name in names}
        paths["PRIVOT_HOME"] = str(folder / "nowhere" / "home")
        paths["PRIVOT_DATA"] = str(folder / "nowhere" / "data")
        stack.enter_context(mock.patch.dict(os.environ, paths))
        stack.enter_context(mock.patch.object(os, "urandom", urandom))
        stack.enter_context(mock.patch.object(random, "_urandom", urandom))  # of `secrets`
        stack.enter_context(mock.patch.object(os, "fsync", return_value=None))
        for name, module in list(sys.modules.items()):  # see support/deterministic_chance.py
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
