r"""Tracing by means (Homer et al. 2008; Dwork et al. 2015): is a released mean shifted to x?

A condensed set has nearly the mean features of its records, and each record moved that mean a
little towards itself. With random ConvNets psi, a class c, its mean m_c of psi over another
population, and d features,

    score(x) = mean over psi of (psi(x) - m_c)' A (mean psi(S_c) - m_c) / d.

A = I is the tracing of the papers. A = (Sigma + ridge tr(Sigma)/d I)^-1, with the covariance Sigma
of the population about its class means, is the direction of the likelihood ratio, and much stronger
if few features carry most of the variance. If S_c has the mean of n records, members are about
sqrt(d_eff / n) standard deviations above non-members, and A makes d_eff large.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from privot.errors import SettingError
from privot.nets.conv_block import autocast_half
from privot.nets.ensemble import Ensemble

NUM_RANDOM_NETS = 32  # more nets add little compared with the chance in who is a member
RIDGE = 0.1  # share of the mean variance
BATCH_SIZE = 1024


@torch.no_grad()
def trace_members(
    candidates: Tensor,
    labels: Tensor,
    released: Tensor,
    released_labels: Tensor,
    population: Tensor,
    population_labels: Tensor,
    *,
    num_nets: int = NUM_RANDOM_NETS,
    net_width: int = 128,
    ridge: float | None = RIDGE,
    seed: int = 0,
) -> np.ndarray:
    """Score each candidate by the shift of a released mean towards it.

    The attack runs where ``released`` is, one net at a time, so memory holds the features of one
    batch.

    Args:
        candidates: Candidates, [candidates, channels, height, width] in [0, 1].
        labels: Their classes, [candidates].
        released: Released set, [released, channels, height, width] in [0, 1].
        released_labels: Its classes, [released].
        population: Records of another population, or the sets of shadows together. Every class of
            the candidates must occur in it and in the released set.
        population_labels: Its classes.
        num_nets: Number of random ConvNets.
        net_width: Their channels.
        ridge: Ridge of the covariance; None: A = I.
        seed: Seed of the ConvNets.

    Returns:
        Scores, float64 [candidates].

    Raises:
        SettingError: If a class is missing.

    >>> images = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> labels = torch.arange(40) % 2
    >>> members, population = (images[:20], labels[:20]), (images[20:], labels[20:])
    >>> scores = trace_members(
    ...     *members, images[:10], labels[:10], *population, num_nets=4, net_width=8)
    >>> bool(scores[:10].mean() > scores[10:].mean())
    True
    """
    device = released.device
    num_classes = 1 + int(max(side.max() for side in (labels, released_labels, population_labels)))
    for name, side in (("released set", released_labels), ("population", population_labels)):
        if missing := sorted(set(labels.unique().tolist()) - set(side.unique().tolist())):
            raise SettingError(f"class {missing[0]} has no image in the {name}")
    shape = (released.shape[1], released.shape[2], released.shape[3])
    rng = torch.Generator().manual_seed(seed)
    scores = torch.zeros(len(candidates), dtype=torch.float64, device=device)
    device_labels = labels.to(device)
    for _ in range(num_nets):
        net = Ensemble(1, shape, 1, net_width, generator=rng).to(device)
        class_means, covariance = _compute_moments(
            net, population, population_labels, num_classes, ridge is not None
        )
        released_means, _ = _compute_moments(net, released, released_labels, num_classes, False)
        direction = released_means - class_means
        if ridge is not None:
            covariance.diagonal().add_(ridge * covariance.diagonal().mean())
            direction = torch.linalg.solve(covariance, direction.T).T
        for start in range(0, len(candidates), BATCH_SIZE):
            batch = candidates[start : start + BATCH_SIZE].to(device)
            batch_labels = device_labels[start : start + BATCH_SIZE]
            centered = _extract_features(net, batch) - class_means[batch_labels]
            scores[start : start + BATCH_SIZE] += (centered * direction[batch_labels]).mean(1)
    return (scores / num_nets).cpu().numpy()


def _extract_features(net: Ensemble, images: Tensor) -> Tensor:
    """Compute features, float64 [count, features].

    Half precision is enough for the feature maps of a random net, but not for sums over many of
    them.
    """
    with autocast_half(images.device):
        return net.features(2 * images.float() - 1)[0].double()


def _compute_moments(
    net: Ensemble, images: Tensor, labels: Tensor, num_classes: int, with_covariance: bool
) -> tuple[Tensor, Tensor]:
    """Compute class means of features and the covariance about them.

    Args:
        net: The random net.
        images: Images, [count, channels, height, width].
        labels: Their classes, [count].
        num_classes: Number of classes.
        with_covariance: Whether to compute the covariance.

    Returns:
        Class means [num_classes, features], 0 for a class without images; and the covariance
        [features, features], or an empty tensor.
    """
    device = net.get_parameter("head_bias").device
    totals, products = (
        torch.zeros(rows, net.num_features, dtype=torch.float64, device=device)
        for rows in (num_classes, net.num_features if with_covariance else 0)
    )
    for batch, batch_labels in zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True):
        features = _extract_features(net, batch.to(device))
        totals.index_add_(0, batch_labels.to(device), features)
        if with_covariance:
            products += features.T @ features
    counts = torch.bincount(labels.to(device), minlength=num_classes).clamp(min=1)
    means = totals / counts[:, None]
    return means, (products - totals.T @ means) / len(labels) if with_covariance else products
