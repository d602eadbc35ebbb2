"""Baselines without a mechanism, fitted to records without a ledger or a release."""

from types import SimpleNamespace

import torch

from privot.data.dataset import Records
from privot.runtime import Runtime, Streams, ignore_progress


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_random_records(shape=(1, 8, 8), sizes=(7, 4, 9), seed=0):
    """Random records in classes of these sizes, mixed."""
    order = torch.randperm(sum(sizes), generator=make_generator(seed))
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[order]
    return Records(torch.rand(sum(sizes), *shape, generator=make_generator(seed + 1)), labels)


def fit_on_records(method, records, spec, device="cpu", seed=0):
    """The artifact, and the reason that the method gives for having no guarantee."""
    reasons = []

    def read_without_guarantee(reason):
        reasons.append(reason)
        return Records(*(tensor.to(device) for tensor in records))

    gate = SimpleNamespace(spec=spec, read_without_guarantee=read_without_guarantee)
    artifact = method.fit(gate, Streams(seed, Runtime(device)), ignore_progress)
    return artifact, reasons[0]


def fit_images(method, records, spec, device="cpu", seed=0):
    return fit_on_records(method, records, spec, device, seed)[0].tensors["images"]
