"""Training of a generator with an exponential moving average (EMA) of its weights.

The weights, their average and the optimizer form one object that can be saved and restored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LR_WARMUP_STEPS = 100  # steps in which the learning rate rises, at most
RECALIBRATION_BATCHES = 20  # batches for the batch-norm statistics of the averaged weights


def cosine_warmup(peak_learning_rate: float, step: int, steps: int) -> float:
    """Return a learning rate that rises linearly at first and falls to 0 along a cosine.

    Args:
        peak_learning_rate: The rate that warm-up leads to.
        step: Index of the step, from 0.
        steps: Number of all steps.

    Returns:
        The learning rate of this step.

    >>> [round(cosine_warmup(1.0, step, 1000), 2) for step in (0, 99, 500, 999)]
    [0.01, 0.98, 0.5, 0.0]
    """
    return (
        peak_learning_rate
        * min(1, (step + 1) / LR_WARMUP_STEPS)
        * (1 + math.cos(math.pi * step / steps))
        / 2
    )


def collect_state(**components: Any) -> dict[str, Tensor]:
    """Collect the states of networks, optimizers and numbers as named tensors.

    Args:
        components: Networks, optimizers and numbers by name.

    Returns:
        Copies of all tensors. Numbers become tensors.

    >>> sorted(collect_state(net=nn.Linear(2, 1), step=3))
    ['net.bias', 'net.weight', 'step']
    """
    tensors: dict[str, Tensor] = {}
    for name, component in components.items():
        if isinstance(component, nn.Module):
            tensors |= {
                f"{name}.{key}": value.detach().clone()
                for key, value in component.state_dict().items()
            }
        elif isinstance(component, torch.optim.Optimizer):
            tensors |= {
                f"{name}.{index}.{key}": value.clone()
                for index, state in component.state_dict()["state"].items()
                for key, value in state.items()
            }
        else:
            tensors[name] = torch.as_tensor(component)
    return tensors


def restore_state(state: dict[str, Tensor], **components: Any) -> None:
    """Load the tensors of `collect_state` into networks and optimizers.

    Args:
        state: The tensors by name.
        components: Networks and optimizers of the same kinds and under the same names.

    >>> saved, restored = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> restore_state(collect_state(net=saved), net=restored)
    >>> torch.equal(saved.weight, restored.weight)
    True
    """
    for name, component in components.items():
        tensors = {
            key.removeprefix(f"{name}."): value
            for key, value in state.items()
            if key.startswith(f"{name}.")
        }
        if isinstance(component, nn.Module):
            component.load_state_dict(tensors)
        else:
            _restore_optimizer(component, tensors)


def _restore_optimizer(optimizer: Any, tensors: dict[str, Tensor]) -> None:
    """Load tensors named "<parameter index>.<key>" into an optimizer."""
    parameter_states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        parameter_states.setdefault(int(index), {})[key] = value
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(
        {"state": parameter_states, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    # Loading replaces the learning rate by a copy. A rate that is a tensor is changed from outside,
    # so the same object must stay.
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate


class EmaTrainer:
    """Trains a network by Adam and averages its weights. The average is what a release contains.

    The decay of the average is smaller in the first steps, because the first weights are random.
    `apply_step` may be captured in a CUDA graph; then call `prepare_step` before each replay.

    Args:
        net: The network to train.
        learning_rate: Learning rate of Adam.
        betas: Decay rates of Adam's moments.
        ema_decay: Decay of the average per step.

    Attributes:
        net: The network in training.
        ema_net: The network with the averaged weights.
        steps: Number of steps so far.

    >>> trainer = EmaTrainer(nn.Linear(2, 1), learning_rate=0.1, betas=(0.0, 0.9), ema_decay=0.999)
    >>> trainer.net(torch.ones(1, 2)).sum().backward()
    >>> trainer.step()
    >>> trainer.steps
    1
    """

    def __init__(
        self, net: nn.Module, learning_rate: float, betas: tuple[float, float], ema_decay: float
    ):
        self.net = net
        self.ema_net = copy.deepcopy(net)
        self.ema_decay = ema_decay
        self.steps = 0
        device = next(net.parameters()).device
        on_gpu = device.type == "cuda"
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self.current_decay = torch.zeros((), device=device)
        self.optimizer = torch.optim.Adam(
            net.parameters(), lr=self.learning_rate, betas=betas, capturable=on_gpu, fused=on_gpu
        )

    def prepare_step(self, learning_rate: float | None = None) -> None:
        """Set the decay and, if given, the learning rate of the next step.

        This does not synchronize with the device.
        """
        if learning_rate is not None:
            self.learning_rate.fill_(learning_rate)
        self.current_decay.fill_(min(self.ema_decay, (1 + self.steps) / (10 + self.steps)))
        self.steps += 1

    def apply_step(self) -> None:
        """Apply the gradients of the network, clear them, and update the average."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for averaged, current in zip(
                self.ema_net.parameters(), self.net.parameters(), strict=True
            ):
                averaged.lerp_(current, 1 - self.current_decay)

    def step(self) -> None:
        self.prepare_step()
        self.apply_step()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state as named tensors."""
        return collect_state(net=self.net, mean=self.ema_net, adam=self.optimizer, steps=self.steps)

    def restore(self, state: dict[str, Tensor] | None) -> bool:
        """Load a state of `state_dict`, if there is one, and return whether there was."""
        if state is None:
            return False
        restore_state(state, net=self.net, mean=self.ema_net, adam=self.optimizer)
        self.steps = int(state["steps"])
        return True

    def recalibrate(self, generate: Callable[[nn.Module], Any]) -> nn.Module:
        """Recompute the batch-norm statistics of the averaged network.

        The statistics so far belong to other weights than the averaged ones.

        Args:
            generate: Runs a network on one batch.

        Returns:
            The averaged network in evaluation mode.
        """
        norms = [
            module
            for module in self.ema_net.modules()
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))
        ]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        self.ema_net.train()
        with torch.no_grad():
            for _ in range(RECALIBRATION_BATCHES if norms else 0):
                generate(self.ema_net)
        return self.ema_net.eval()
