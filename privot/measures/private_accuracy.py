"""Accuracy on a sensitive test set, measured with differential privacy.

The accuracies come out of the gate with noise and are charged to the ledger of the test set, so
they may be published.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from privot.data import load_catalog
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.measures.downstream_networks import DOWNSTREAM_NETWORKS, train_downstream_network
from privot.measures.result import MetricResult
from privot.measures.samples import Samples, check_matching_spec
from privot.nets.training import Classifier
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import open_ledger
from privot.privacy.plan import Plan, PrivacyTarget, Stage
from privot.progress import Progress, ignore_progress
from privot.runtime import Runtime

METHOD_NAME = "private accuracy"


def measure_private_accuracy(
    samples: Samples,
    test_data: Sensitive,
    budget: PrivacyTarget,
    classifier_names: Sequence[str] = ("cnn",),
    *,
    ledger: Ledger | str | Path | None = None,
    runtime: Runtime | None = None,
    seed: int = 0,
    progress: Progress = ignore_progress,
    insecure_seed: int | None = None,
) -> list[MetricResult]:
    r"""Train networks on synthetic images and measure their accuracy on sensitive test data.

    Args:
        samples: The synthetic images.
        test_data: The sensitive test data.
        budget: Privacy budget that this measurement may use of the test data.
        classifier_names: Keys of `DOWNSTREAM_NETWORKS`. All share one query.
        ledger: Ledger of the test data, or its path; None for the one that belongs to the data.
        runtime: Device of the networks.
        seed: Seed of the trainings.
        progress: Called after each epoch.
        insecure_seed: Seed of the noise, for tests. The results are then not publishable.

    Returns:
        One noisy accuracy per network. Its standard error includes the noise.

    Raises:
        SettingError: A name is not one of a network, or the test data does not fit.
        BudgetError: The ledger's limit does not allow the measurement.
    """
    networks = [name for name in classifier_names if name in DOWNSTREAM_NETWORKS]
    if not networks or len(networks) < len(classifier_names):
        raise SettingError(
            "A private accuracy can only be measured with networks. "
            f"Choose from {', '.join(DOWNSTREAM_NETWORKS)}."
        )
    ledger = open_ledger(test_data.name, ledger)
    check_matching_spec(samples, test_data)
    runtime = runtime or Runtime()
    start = time.perf_counter()
    plan = Plan((Stage("hits", "sum", 1.0),), Neighbours.REPLACE).calibrate(budget)
    ledger.require_writable()  # fails before the work
    ledger.check_limit(plan, method=METHOD_NAME, seeded=insecure_seed is not None)
    gate = Gate(
        test_data,
        plan,
        ledger,
        budget,
        method=METHOD_NAME,
        runtime=runtime,
        insecure_seed=insecure_seed,
    )
    trained_networks = _train_networks(
        networks, samples, test_data.spec, runtime.torch_device, seed, progress
    )
    # privacy: each record contributes one vector: a 0 or 1 per network for a wrong or correct
    # prediction, and a 1 that counts the record where the size is not declared. Its norm is at most
    # sqrt(k + 1), so one Gaussian sum covers all networks. Nothing else checks the test records
    # here, since the outcome of a check would be a query result too.
    include_count = test_data.spec.size is None
    clip_norm = math.sqrt(len(networks) + include_count)
    classifiers = [classifier for classifier, _ in trained_networks]
    noisy_counts = gate.sum("hits", _score_record, classifiers, include_count, clip_norm=clip_norm)
    noisy_counts = noisy_counts.double().cpu()
    noise_multiplier = plan.stages[0].noise_multiplier
    size = float(test_data.spec.size or max(1.0, noisy_counts[-1].item()))
    noise_std = noise_multiplier * 2 * clip_norm / size  # of an accuracy
    cost_description = _describe_cost(plan, budget)
    results = []
    for index, name in enumerate(networks):
        accuracy = min(1.0, max(0.0, noisy_counts[index].item() / size))
        sampling_variance = accuracy * (1 - accuracy) / size
        noise_variance = noise_std**2 * (1 + accuracy**2 * include_count)
        results.append(
            MetricResult(
                f"{name}_accuracy",
                accuracy,
                math.sqrt(sampling_variance + noise_variance),
                len(samples.labels),
                _describe_reference(test_data),
                round(size),
                samples.publishable and insecure_seed is None and noise_multiplier > 0,
                f"{trained_networks[index][1]}; {cost_description}",
                seconds=time.perf_counter() - start,
            )
        )
    return results


def _train_networks(
    names: list[str],
    samples: Samples,
    spec: Spec,
    device: torch.device,
    seed: int,
    progress: Progress,
) -> list[tuple[Classifier, str]]:
    """Train networks on the synthetic images, each once.

    Args:
        names: Keys of `DOWNSTREAM_NETWORKS`.
        samples: The synthetic images.
        spec: Spec of the test data.
        device: Where the networks are trained.
        seed: Seed of the trainings.
        progress: Called after each epoch.

    Returns:
        The classifiers and the texts of their protocols.
    """
    return [
        train_downstream_network(
            name,
            samples.images,
            samples.labels,
            spec,
            device,
            seed,
            progress,
            soft_labels=samples.soft_labels,
        )
        for name in names
    ]


def _describe_cost(plan: Plan, budget: PrivacyTarget) -> str:
    """Describe the spent privacy budget; epsilon is rounded up to three decimals."""
    epsilon = float(plan.cost().epsilon(budget.delta))
    if epsilon < math.inf:
        epsilon = math.ceil(epsilon * 1000 - 1e-3) / 1000
    return (
        f"through the gate at epsilon {epsilon:g} of the test data, delta {budget.delta:g}, "
        "replace neighbours"
    )


def _describe_reference(test_data: Sensitive) -> str:
    """Name the test data. The name of a file may reveal too much, so only built-ins are named."""
    is_builtin = test_data.name.removesuffix("/test") in load_catalog()
    return test_data.name if is_builtin else "the owner's test data"


def _score_record(
    image: Tensor, label: Tensor, classifiers: list[Classifier], include_count: bool
) -> Tensor:
    """Score one record: whether each classifier is correct, and a 1 if the size is counted.

    Args:
        image: Image [channels, height, width] in [0, 1].
        label: Its label.
        classifiers: The k classifiers.
        include_count: Whether the record itself is counted.

    Returns:
        Zeros and ones, float32 [k] or [k + 1].
    """
    hits = [
        classifier.net(((image - classifier.mean) / classifier.std)[None])[0].argmax() == label
        for classifier in classifiers
    ]
    counts = [torch.ones_like(hits[0])] if include_count else []
    return torch.stack([*hits, *counts]).float()
