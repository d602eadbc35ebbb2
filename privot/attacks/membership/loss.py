"""What a classifier says about a candidate: the loss attack's score, and the statistic on which LiRA stands."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from privot.errors import SettingError


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    r"""log p_y - log \sum_{k != y} p_k: logits [..., candidates, classes] and labels [candidates] to float64 [..., candidates].

    The sum over the others is taken among the logits themselves, so a sure answer keeps all its digits, where probabilities round to 1.
    Logarithms of probabilities are logits too, as far as their digits go.

    >>> confidence(torch.tensor([[80.0, 0.0, 0.0]]), torch.tensor([0]))
    tensor([79.3069], dtype=torch.float64)
    """
    logits = torch.as_tensor(logits).double()
    labels = torch.as_tensor(labels)
    if logits.ndim < 2 or logits.shape[-1] < 2 or labels.shape != logits.shape[-2:-1]:
        raise SettingError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)}: [..., count, 2 or more] and [count] are needed"
        )
    place = labels.to(logits.device).long().expand(logits.shape[:-1])[..., None]
    return logits.gather(-1, place).squeeze(-1) - logits.scatter(-1, place, -torch.inf).logsumexp(
        -1
    )


def negative_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Minus the cross-entropy, log p_y, of logits [..., candidates, classes] and labels [candidates]: float64 [..., candidates].

    It is log sigmoid(`confidence`): one threshold on either is the same attack (Yeom et al. 2018).

    >>> negative_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([-0.6931], dtype=torch.float64)
    """
    return logsigmoid(confidence(logits, labels))
