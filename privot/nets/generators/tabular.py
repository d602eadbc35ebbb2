"""A generator of table rows: numbers, categories, or both. Points in the plane are rows too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class TabularGenerator(nn.Module):
    """Map a latent and a label to a table row.

    `generate_relaxed` returns the probabilities of each category, which can be differentiated.
    `forward` samples the category with the last dimensions of the latent and returns its index.

    Args:
        shape: Shape of a row as an image: channels, height and width. Its values are the columns
            from left to right.
        classes: Number of classes; with 1 the label is not an input.
        columns: Runs of columns from left to right: [count, low, high] for numbers in a range, or
            [num_categories] for one categorical column.
        latent_dim: Dimension of the network's standard Gaussian input. The attribute of the same
            name also counts the dimensions that sample categories: latents are
            [batch, net.latent_dim].
        hidden_dim: Units of the hidden layers.
        num_layers: Number of dense layers.

    >>> net = TabularGenerator((1, 1, 3), classes=1, columns=[[2, -1.0, 1.0], [5]])
    >>> latents, labels = torch.zeros(4, net.latent_dim), torch.zeros(4, dtype=torch.int64)
    >>> net.generate_relaxed(latents, labels).shape, net(latents, labels).shape
    (torch.Size([4, 7]), torch.Size([4, 1, 1, 3]))
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        columns: Sequence[Sequence[float]],
        latent_dim: int = 8,
        hidden_dim: int = 128,
        num_layers: int = 3,
    ):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.columns = [tuple(run) for run in columns]
        self.column_dims = [int(run[0]) for run in columns]
        self.noise_dim = sum(int(run[0]) for run in columns if len(run) == 1)
        self.network_latent_dim = latent_dim
        self.latent_dim = latent_dim + self.noise_dim
        layer_dims = [
            latent_dim + (classes if classes > 1 else 0),
            *[hidden_dim] * (num_layers - 1),
            sum(self.column_dims),
        ]
        layers: list[nn.Module] = []
        for in_dim, out_dim in pairwise(layer_dims):
            layers += [nn.Linear(in_dim, out_dim), nn.SiLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def generate_relaxed(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Generate numbers and category probabilities.

        Args:
            latents: Standard Gaussian latents, [batch, latent_dim].
            labels: Class labels, [batch].

        Returns:
            Numbers and probabilities side by side, [batch, dim].
        """
        return torch.cat([values for values, _ in self._generate_column_runs(latents, labels)], 1)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        columns = []
        noise = latents[:, self.network_latent_dim :]
        for values, num_categories in self._generate_column_runs(latents, labels):
            if num_categories:
                # Gumbel-max: the largest log-probability plus Gumbel noise is a sample.
                uniform = torch.special.ndtr(noise[:, :num_categories].double())
                noise = noise[:, num_categories:]
                gumbel = -(-uniform.clamp(1e-300, 1 - 1e-16).log()).log()
                log_probabilities = values.double().clamp(min=1e-300).log()
                category = (log_probabilities + gumbel).argmax(1, keepdim=True)
                columns.append(category.to(values))
            else:
                columns.append(values)
        return torch.cat(columns, 1).view(-1, *self.shape)

    def _generate_column_runs(self, latents: Tensor, labels: Tensor) -> list[tuple[Tensor, int]]:
        """Return the values of each run of columns and its number of categories (0: numbers)."""
        inputs = latents[:, : self.network_latent_dim]
        if self.classes > 1:
            one_hot = nn.functional.one_hot(labels, self.classes).to(latents)
            inputs = torch.cat([inputs, one_hot], 1)
        outputs = self.layers(inputs).split(self.column_dims, 1)
        return [
            (raw.softmax(1), int(run[0])) if len(run) == 1 else (scale_to_range(raw, *run[1:]), 0)
            for raw, run in zip(outputs, self.columns, strict=True)
        ]


def scale_to_range(raw: Tensor, low: float, high: float) -> Tensor:
    """Map any number into a range by a sigmoid.

    Args:
        raw: The numbers.
        low: Lower end of the range.
        high: Upper end of the range.

    Returns:
        Numbers in [low, high], of the same shape.
    """
    return low + (high - low) * raw.sigmoid()
