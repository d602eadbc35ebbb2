"""Mean embeddings by random Fourier features: the query of DP-MERF, and a generator's fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from privot.data.spec import Spec
from privot.errors import SettingError
from privot.runtime import Progress, Streams

# Share of the norm of a record's vector that goes to the class count. The count's noise is then 10
# times that of a feature, and the features lose 0.5 % of their length.
COUNT_SHARE = 0.1

CALLS_PER_STEP = 200  # calls of tensor operators in a step of `fit_generator`
ELEMENTWISE_PASSES = 4  # passes over the features of a batch in a step of `fit_generator`
LR_WARMUP_STEPS = 100


def compute_fourier_features(points: Tensor, frequencies: Tensor) -> Tensor:
    """Compute random Fourier features of unit norm: [..., dim] to [..., num_features]."""
    phase = points @ frequencies
    return torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(frequencies.shape[1])


def append_count(features: Tensor, count_share: float) -> Tensor:
    """Append a constant that counts the record; the norm of the result is 1.

    Args:
        features: Features of unit norm [num_features].
        count_share: The constant, the share of the norm that it takes.

    Returns:
        The vector [num_features + 1].
    """
    return torch.cat(
        [features * math.sqrt(1 - count_share**2), features.new_full((1,), count_share)]
    )


def choose_count_share(spec: Spec) -> float:
    """Return the share of the norm for class counts: 0 if class sizes are declared."""
    return 0.0 if spec.class_sizes else COUNT_SHARE


def draw_frequencies(
    dim: int, num_features: int, bandwidths: tuple[float, ...], scale: float, rng: torch.Generator
) -> Tensor:
    """Draw the random frequencies of Gaussian kernels, an equal number for each bandwidth.

    Args:
        dim: Dimension of the points.
        num_features: Number of Fourier features, two for each frequency.
        bandwidths: Bandwidths of the kernels, in units of `scale`.
        scale: Unit of the bandwidths.
        rng: Random generator.

    Returns:
        Frequencies [dim, num_features // 2].
    """
    num_frequencies = num_features // 2
    draws = torch.randn(dim, num_frequencies, generator=rng)
    repeats = math.ceil(num_frequencies / len(bandwidths))
    return draws / (torch.tensor(bandwidths).repeat(repeats)[:num_frequencies] * scale)


def require_bandwidths(method_name: str, bandwidths: tuple[float, ...]) -> None:
    """Raise an error unless there is a bandwidth and all are finite numbers above 0.

    Raises:
        SettingError: A bandwidth is out of range, or there is none.
    """
    if not bandwidths or not all(0 < bandwidth < math.inf for bandwidth in bandwidths):
        raise SettingError(
            f"{method_name}.bandwidths={bandwidths} is out of range. "
            "Give one or more finite numbers above 0."
        )


def target_embedding(noisy_sum: Tensor, count_share: float, spec: Spec) -> tuple[Tensor, Tensor]:
    """Turn a noisy sum of features by class into the target of `fit_generator`.

    Args:
        noisy_sum: Noisy sums of the vectors of `append_count` [num_classes, num_features + 1].
        count_share: Share of the norm that counts records.
        spec: Spec of the data, with class sizes if `count_share` is 0.

    Returns:
        Class sums divided by the mean class size [num_classes, num_features], and class sizes
        divided by the mean class size [num_classes].
    """
    sizes = (
        torch.tensor(spec.class_sizes, dtype=torch.float64, device=noisy_sum.device)
        if spec.class_sizes
        else (noisy_sum[:, -1] / count_share)
    )
    sizes = sizes.clamp(min=0)
    mean_size = sizes.mean().clamp(min=1)
    embedding = noisy_sum[:, :-1] / (mean_size * math.sqrt(1 - count_share**2))
    return embedding.float(), (sizes / mean_size).float()


def fit_generator(
    generate: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[Tensor],
    target: Tensor,
    class_weights: Tensor,
    frequencies: Tensor,
    *,
    latent_dim: int,
    steps: int,
    batch_per_class: int,
    feature_batch_size: int,
    learning_rate: float,
    streams: Streams,
    progress: Progress,
) -> None:
    """Minimize the squared distance between the generated embedding and the target.

    Args:
        generate: Function of latents [batch, latent_dim] and labels [batch] to points.
        parameters: Parameters to optimize.
        target: Target embedding [num_classes, num_features].
        class_weights: Class sizes divided by the mean class size [num_classes].
        frequencies: Frequencies of the features [dim, num_features // 2].
        latent_dim: Dimension of the latent vectors.
        steps: Number of optimizer steps.
        batch_per_class: Generated points of each class in a step.
        feature_batch_size: Features in a step.
        learning_rate: Largest learning rate of Adam; it falls to 0 along a cosine.
        streams: Public random streams.
        progress: Shows the progress.
    """
    device = target.device
    labels = torch.arange(len(target), device=device).repeat_interleave(batch_per_class)
    latent_rng = streams.make_rng("codes", device)
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    num_frequencies = frequencies.shape[1]
    num_selected = min(feature_batch_size // 2, num_frequencies)
    offset_rng = streams.make_rng("portions")
    offsets = torch.randint(num_frequencies, (steps,), generator=offset_rng).tolist()
    for step in range(steps):
        warmup = min(1, (step + 1) / LR_WARMUP_STEPS)
        optimizer.param_groups[0]["lr"] = (
            learning_rate * warmup * (1 + math.cos(math.pi * step / steps)) / 2
        )
        latents = torch.randn(len(labels), latent_dim, generator=latent_rng, device=device)
        points = generate(latents, labels).flatten(1)
        # Any run of consecutive random frequencies is a random choice.
        selected = (torch.arange(num_selected, device=device) + offsets[step]) % num_frequencies
        loss = _embedding_loss(points, target, class_weights, frequencies, selected)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 25 == 24 or step + 1 == steps:
            progress("training the generator", step + 1, steps)


def _embedding_loss(
    points: Tensor, target: Tensor, class_weights: Tensor, frequencies: Tensor, selected: Tensor
) -> Tensor:
    """Estimate the squared distance of embeddings, up to a constant, from some of the features.

    The squared norm of a batch's mean embedding has a bias, which the factor B / (B - 1) removes.

    Args:
        points: Generated points, B of each class, sorted by class [classes * B, dim].
        target: Target embedding [num_classes, num_features].
        class_weights: Class sizes divided by the mean class size [num_classes].
        frequencies: Frequencies of the features [dim, num_features // 2].
        selected: Indices of the frequencies to use.

    Returns:
        The loss [].
    """
    num_classes = len(target)
    batch_per_class = len(points) // num_classes
    num_frequencies = frequencies.shape[1]
    scale = math.sqrt(num_frequencies / len(selected))
    selected_target = (
        torch.cat([target[:, selected], target[:, selected + num_frequencies]], 1) * scale
    )
    features = compute_fourier_features(points, frequencies[:, selected])
    embedding = features.view(num_classes, batch_per_class, -1).mean(1) * class_weights[:, None]
    bias_correction = batch_per_class / (batch_per_class - 1)
    return bias_correction * embedding.square().sum() - 2 * (embedding * selected_target).sum()
