r"""DP-MERF: match a generator to the noisy mean embedding of the data.

**Released** once: the sum over records of random Fourier features, by class, with Gaussian noise,
and with it a noisy count of each class unless class sizes are declared.
**Bound** the vector of every record has norm 1 by construction (cos² + sin² = 1, shared with the
count), and the gate clips it to 1.
**Cost** one full-batch Gaussian query. All training of the generator is post-processing.
**Departs** from the paper: the counts are part of the same query; the squared norm of the generated
embedding is estimated without its batch bias; several bandwidths share the features; bandwidths
come from settings, never from the data.
**Notation** features phi(x) = [cos(Wx), sin(Wx)]/sqrt(num_features/2), rows of W ~ N(0,
I/bandwidth²).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from privot.components.method_base import MethodBase
from privot.components.random_features import (
    CALLS_PER_STEP,
    ELEMENTWISE_PASSES,
    append_count,
    choose_count_share,
    compute_fourier_features,
    draw_frequencies,
    fit_generator,
    require_bandwidths,
    target_embedding,
)
from privot.components.validation import require_choice, require_noise_multiplier, require_range
from privot.data.spec import Spec
from privot.nets import GENERATORS, initialize_weights
from privot.nets.generators.dense import generator_config
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

# Norm of a class's mean embedding, about that of MNIST at the bandwidth 10.25.
TYPICAL_EMBEDDING_NORM = 0.8
# Directions in which noise reaches the generator, however many features there are. This is a guess,
# not a measurement.
NUM_NOISE_DIRECTIONS = 100


def embed_and_count(
    image: Tensor, label: Tensor, frequencies: Tensor, count_share: float
) -> Tensor:
    """Compute a record's features and its constant for the count, of norm 1 together.

    Args:
        image: One image [channels, height, width].
        label: Its label [], which the gate uses to sum by class.
        frequencies: Frequencies of the features [num_pixels, num_features // 2].
        count_share: Share of the norm that goes to the count.

    Returns:
        The vector [num_features + 1].
    """
    return append_count(compute_fourier_features(image.flatten(), frequencies), count_share)


@dataclass(frozen=True, kw_only=True)
class DPMERF(MethodBase):
    """Settings of DP-MERF.

    >>> plan = DPMERF(noise_multiplier=5.0).plan(Spec((1, 28, 28), 10))
    >>> round(plan.cost().epsilon(1e-5), 3)
    0.726
    """

    name: ClassVar[str] = "merf"
    title: ClassVar[str] = "DP-MERF: a generator from a noisy mean embedding"
    trusted_party: ClassVar[str] = "the data owner"
    guarantee_summary: ClassVar[str] = "(epsilon, delta), one Gaussian query"
    citation: ClassVar[str] = """@inproceedings{harder2021dpmerf,
  title     = {{DP-MERF}: Differentially Private Mean Embeddings with Random Features for Practical
               Privacy-Preserving Data Generation},
  author    = {Harder, Frederik and Adamczewski, Kamil and Park, Mijung},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year      = {2021}
}"""

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {"feature_batch_size": 500, "steps": 500}

    noise_multiplier: float | None = None  # noise over sensitivity; None: calibrated to the budget
    neighbours: str = "replace"  # neighboring data sets: "replace" or "add-remove" one record
    num_features: int = 10_000  # random Fourier features
    # Bandwidths of the Gaussian kernels, in pixel values at 784 pixels. The paper has 10.25 alone;
    # how these were chosen: bench/RESULTS.md.
    bandwidths: tuple[float, ...] = (8.0, 5.0, 3.0)
    generator: str = "dense"  # architecture of the generator: "dense" or "conv"
    latent_dim: int = 5  # dimension of the generator's latent vectors
    hidden_dim: int = 256  # units of the generator's hidden layers
    num_frequencies: int = 14  # DCT coefficients per side that the dense generator generates
    steps: int = 3000  # training steps of the generator
    batch_per_class: int = 25  # generated images of each class in a step
    feature_batch_size: int = 4000  # features in a step
    learning_rate: float = 0.01  # largest learning rate of Adam

    def __post_init__(self) -> None:
        require_choice(self, "neighbours", ("replace", "add-remove"))
        require_choice(self, "generator", ("dense", "conv"))
        require_range(
            self,
            "num_features",
            "latent_dim",
            "hidden_dim",
            "num_frequencies",
            "steps",
            "batch_per_class",
            "feature_batch_size",
            minimum=2,
        )
        require_range(self, "learning_rate", above=0, below=1)
        require_bandwidths(self.name, self.bandwidths)
        require_noise_multiplier(self)

    def plan(self, spec: Spec) -> Plan:
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        return Plan((Stage("embedding", "sum", noise_multiplier),), Neighbours(self.neighbours))

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        sensitivity = 2 if plan.neighbours is Neighbours.REPLACE else 1
        noise_std = plan.stages[0].noise_multiplier * sensitivity
        if spec.class_sizes:
            records_per_class: float | None = min(spec.class_sizes)
        else:
            records_per_class = spec.size / spec.num_classes if spec.size else None
        batch_features = min(self.feature_batch_size, self.num_features)
        flops = (
            self.steps * self.batch_per_class * spec.num_classes * 3 * batch_features
            + (spec.size or 0) * self.num_features
        ) * spec.num_features
        signal_to_noise = (
            TYPICAL_EMBEDDING_NORM
            * records_per_class
            / (noise_std * math.sqrt(NUM_NOISE_DIRECTIONS))
            if records_per_class and noise_std
            else None
        )
        return {
            "signal_to_noise_per_class": signal_to_noise,
            "floating_point_operations": flops,
            "elementwise_operations": ELEMENTWISE_PASSES
            * self.steps
            * self.batch_per_class
            * spec.num_classes
            * batch_features,
            "operator_calls": self.steps * CALLS_PER_STEP,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Query the mean embedding of the records, and fit a generator to it.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        spec = gate.spec
        device = streams.runtime.torch_device
        # Distances between images grow with their side, and so do the bandwidths.
        scale = math.sqrt(spec.num_features / 784)
        frequencies = draw_frequencies(
            spec.num_features,
            self.num_features,
            self.bandwidths,
            scale,
            streams.make_rng("features"),
        ).to(device)
        count_share = choose_count_share(spec)
        progress("embedding the records", 0, 1)
        noisy_sum = gate.sum(
            "embedding", embed_and_count, frequencies, count_share, clip_norm=1.0, per_class=True
        )
        progress("embedding the records", 1, 1)
        generator_class, config = generator_config(
            self.generator,
            spec.shape,
            spec.num_classes,
            latent_dim=self.latent_dim,
            hidden_dim=self.hidden_dim,
            num_frequencies=self.num_frequencies,
        )
        net = initialize_weights(GENERATORS[generator_class](**config), streams.make_rng("weights"))
        net.to(device).train()
        fit_generator(
            net,
            net.parameters(),
            *target_embedding(noisy_sum, count_share, spec),
            frequencies,
            latent_dim=self.latent_dim,
            steps=self.steps,
            batch_per_class=self.batch_per_class,
            feature_batch_size=self.feature_batch_size,
            learning_rate=self.learning_rate,
            streams=streams,
            progress=progress,
        )
        return Artifact.from_generator(generator_class, config, net.eval())


METHOD = DPMERF
