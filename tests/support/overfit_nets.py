"""Nets that learn records by heart, many side by side and in a second: what attacks by classifiers are made to find."""

import torch
from torch import nn

from privot.attacks.membership.lira import balanced_membership
from privot.data import load_dataset

HIDDEN = 64


def score_digits_with_overfit_nets(count, others, nets, steps, wrong, seed=0):
    """What nets, each trained on its half of ``count`` digits of which a share has a ``wrong`` label, say of all, and of so many others.

    Logits [nets, count + others, classes], labels [count + others] and members [nets, count]; with 0 steps the nets know nothing.
    """
    images, labels = load_dataset("digits", public=True).records()
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=draw)[: count + others]
    images = images[order]
    labels = labels[order]
    changed = torch.arange(len(order)) < wrong * count
    labels = torch.where(
        changed, (labels + torch.randint(1, 10, labels.shape, generator=draw)) % 10, labels
    )
    members = balanced_membership(count, nets, draw)
    return train_overfit_nets(images, labels, members, steps, draw), labels, members


def train_overfit_nets(images, labels, members, steps, draw):
    """Nets of one hidden layer, each trained on its own members, with nothing to hold it back: logits [nets, candidates, classes].

    ``members`` is bool [nets, learned]; images beyond the learned ones are only looked at.
    """
    x = 2 * images.flatten(1) - 1
    held = torch.from_numpy(members).float()
    nets = len(held)
    count = held.shape[1]
    classes = 10
    sizes = (
        (nets, x.shape[1], HIDDEN),
        (nets, 1, HIDDEN),
        (nets, HIDDEN, classes),
        (nets, 1, classes),
    )
    reach = (x.shape[1] ** -0.5, 0.0, HIDDEN**-0.5, 0.0)
    weights = [
        (torch.randn(size, generator=draw) * each).requires_grad_()
        for size, each in zip(sizes, reach, strict=True)
    ]
    adam = torch.optim.Adam(weights, lr=0.01)

    def logits(rows):
        return (rows @ weights[0] + weights[1]).relu() @ weights[2] + weights[3]

    for _ in range(steps):
        adam.zero_grad()
        losses = nn.functional.cross_entropy(
            logits(x[:count]).flatten(0, 1), labels[:count].repeat(nets), reduction="none"
        )
        (
            losses.view(nets, count) * held
        ).sum().backward()  # nets share nothing: each has its own gradient; Adam knows no scale
        adam.step()
    with torch.no_grad():
        return logits(x)
