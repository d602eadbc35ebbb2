"""Scores of the loss attack, and the statistic of LiRA, from the logits of a classifier."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from privot.errors import SettingError


def logit_scaled_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Compute log p_y - log \sum_{k != y} p_k, the statistic of LiRA.

    The sum is computed among the logits, so a confident prediction keeps all its digits.
    Probabilities would round to 1. Logarithms of probabilities are valid logits too, as far as
    their digits go.

    Args:
        logits: Logits, [..., candidates, classes].
        labels: True classes, [candidates].

    Returns:
        Confidences, float64 [..., candidates].

    Raises:
        SettingError: If shapes do not fit.

    >>> logit_scaled_confidence(torch.tensor([[80.0, 0.0, 0.0]]), torch.tensor([0]))
    tensor([79.3069], dtype=torch.float64)
    """
    logits = torch.as_tensor(logits).double()
    labels = torch.as_tensor(labels)
    if logits.ndim < 2 or logits.shape[-1] < 2 or labels.shape != logits.shape[-2:-1]:
        raise SettingError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)}: they must be "
            "[..., count, classes] with at least 2 classes, and [count]"
        )
    index = labels.to(logits.device).long().expand(logits.shape[:-1])[..., None]
    others = logits.scatter(-1, index, -torch.inf)
    return logits.gather(-1, index).squeeze(-1) - others.logsumexp(-1)


def negative_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute minus the cross-entropy, log p_y.

    It is log sigmoid(`logit_scaled_confidence`), so a threshold on either is the same attack (Yeom
    et al. 2018).

    Args:
        logits: Logits, [..., candidates, classes].
        labels: True classes, [candidates].

    Returns:
        Scores, float64 [..., candidates].

    >>> negative_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([-0.6931], dtype=torch.float64)
    """
    return logsigmoid(logit_scaled_confidence(logits, labels))
