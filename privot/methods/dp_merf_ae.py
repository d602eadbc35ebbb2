r"""DP-MERF+AE: DP-MERF in the latent space of an autoencoder that is itself trained by DP-SGD.

**Released** noisy sums of the autoencoder's gradients, each over a Poisson sample of the records;
then, once, the sum over records of random Fourier features of their latent vectors, by class, with
noise, and with it a noisy count of each class unless class sizes are declared.
**Bound** each gradient is clipped to ``autoencoder_clip_norm``; the features of a latent vector,
with the count, have norm 1, and the gate clips them to 1.
**Cost** ``autoencoder_steps`` Gaussian queries on Poisson samples and one on all records, under
add-remove, composed. The rest is post-processing.
**Departs** from the paper, whose code is not published: latent vectors lie on a sphere, so that
bandwidths need no look at the data; the counts are part of the same query.
**Notation** encoder E, decoder D, features phi(c) = [cos(Wc), sin(Wc)]/sqrt(num_features/2) of a
latent vector c = E(x). A share is a share of mu².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.func import functional_call

from privot.components.dp_sgd import detach_weights
from privot.components.latent_space import AUTOENCODER_STAGE, train_privately
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
from privot.components.validation import require_noise_multiplier, require_positive, require_range
from privot.data.spec import Spec
from privot.nets import GENERATORS, initialize_weights
from privot.nets.dp_autoencoder import Autoencoder, Encoder
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

# Calls of tensor operators that take as long as a step of the autoencoder, whose records are
# clipped one by one.
CALLS_PER_AUTOENCODER_STEP = 8000


def embed_latent(
    image: Tensor,
    label: Tensor,
    encoder: Encoder,
    weights: dict[str, Tensor],
    frequencies: Tensor,
    count_share: float,
) -> Tensor:
    """Compute the features of a record's latent vector and its constant for the count.

    Args:
        image: One image [channels, height, width].
        label: Its label [], which the gate uses to sum by class.
        encoder: The encoder.
        weights: Weights of the encoder, by name.
        frequencies: Frequencies of the features [autoencoder_dim, num_features // 2].
        count_share: Share of the norm that goes to the count.

    Returns:
        The vector [num_features + 1], of norm 1.
    """
    latent = functional_call(encoder, weights, (image[None],))[0]
    return append_count(compute_fourier_features(latent, frequencies), count_share)


@dataclass(frozen=True, kw_only=True)
class DPMERFAutoencoder(MethodBase):
    """Settings of DP-MERF+AE. `noise_multiplier` is that of the whole run, about 1/mu.

    >>> settings = DPMERFAutoencoder(
    ...     noise_multiplier=2.0, autoencoder_steps=100, sample_rate=0.1, embedding_share=0.5
    ... )
    >>> plan = settings.plan(Spec((1, 28, 28), 10))
    >>> [(stage.name, round(stage.noise_multiplier, 3)) for stage in plan.stages]
    [('autoencoder', 2.914), ('embedding', 2.828)]
    """

    name: ClassVar[str] = "merf-ae"
    title: ClassVar[str] = "DP-MERF+AE: a noisy mean embedding of an autoencoder's latent vectors"
    trusted_party: ClassVar[str] = "the data owner"
    guarantee_summary: ClassVar[str] = (
        "(epsilon, delta), sampled Gaussian queries and one on all records"
    )
    citation: ClassVar[str] = """@article{harder2020dpmerf,
  title   = {{DP-MERF}: Differentially Private Mean Embeddings with Random Features for Practical
             Privacy-Preserving Data Generation},
  author  = {Harder, Frederik and Adamczewski, Kamil and Park, Mijung},
  journal = {arXiv preprint arXiv:2002.11603},
  year    = {2020}
}"""

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "feature_batch_size": 500,
        "steps": 500,
        "autoencoder_steps": 250,
    }

    noise_multiplier: float | None = None  # of the whole run; None: calibrated to the budget
    embedding_share: float = 0.3  # share of mu² for the embedding; the rest is the autoencoder's
    sample_rate: float = 0.06  # probability of each record to be in an autoencoder step
    autoencoder_steps: int = 2000  # DP-SGD steps of the autoencoder, one query each
    autoencoder_clip_norm: float = 1.0  # largest norm of a record's gradient
    autoencoder_dim: int = 16  # dimension of the autoencoder's latent vectors
    autoencoder_hidden_dim: int = 128  # units of the encoder's and decoder's hidden layers
    num_frequencies: int = 14  # DCT coefficients per side of the encoder's and decoder's images
    autoencoder_learning_rate: float = 5e-3  # initial learning rate of the autoencoder's Adam
    num_features: int = 4000  # random Fourier features
    # Bandwidths of the Gaussian kernels, in norms of a latent vector: DP-MERF's 8, 5 and 3 where
    # the distance between images is about 10.
    bandwidths: tuple[float, ...] = (1.1, 0.7, 0.42)
    latent_dim: int = 5  # dimension of the generator's latent vectors
    hidden_dim: int = 256  # units of the generator's hidden layers
    steps: int = 3000  # training steps of the generator
    batch_per_class: int = 50  # generated latent vectors of each class in a step
    feature_batch_size: int = 2000  # features in a step
    learning_rate: float = 0.01  # largest learning rate of the generator's Adam

    def __post_init__(self) -> None:
        require_positive(
            self,
            "autoencoder_steps",
            "autoencoder_hidden_dim",
            "num_frequencies",
            "latent_dim",
            "hidden_dim",
            "steps",
        )
        require_range(
            self,
            "num_features",
            "feature_batch_size",
            "batch_per_class",
            "autoencoder_dim",
            minimum=2,
        )
        require_range(self, "sample_rate", above=0, maximum=1)
        require_range(self, "embedding_share", above=0, below=1)
        require_range(self, "autoencoder_clip_norm", above=0, below=math.inf)
        require_range(self, "learning_rate", "autoencoder_learning_rate", above=0, below=1)
        require_bandwidths(self.name, self.bandwidths)
        require_noise_multiplier(self)

    def plan(self, spec: Spec) -> Plan:
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        # The noise that gives the sampled queries their share; the accountant computes the exact
        # cost.
        mu_squared_per_step = (1 - self.embedding_share) / (
            self.sample_rate**2 * self.autoencoder_steps
        )
        autoencoder_noise = (
            1 / math.sqrt(math.log1p(mu_squared_per_step / noise_multiplier**2))
            if noise_multiplier
            else 0.0
        )
        stages = (
            Stage(
                AUTOENCODER_STAGE,
                "sum",
                autoencoder_noise,
                self.autoencoder_steps,
                Poisson(self.sample_rate),
            ),
            Stage("embedding", "sum", noise_multiplier / math.sqrt(self.embedding_share)),
        )
        return Plan(stages, Neighbours.ADD_REMOVE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        num_coefficients = spec.shape[0] * math.prod(
            min(self.num_frequencies, side) for side in spec.shape[1:]
        )
        num_weights = (
            (2 * num_coefficients + 2 + 2 * self.autoencoder_dim) * self.autoencoder_hidden_dim
            + num_coefficients
            + self.autoencoder_dim
        )
        size = spec.size or 0
        noise_std = plan.stages[0].noise_multiplier * self.autoencoder_clip_norm
        signal_to_noise = (
            self.autoencoder_clip_norm
            * self.sample_rate
            * size
            / (noise_std * math.sqrt(num_weights))
            if size and noise_std
            else None
        )
        autoencoder_flops = 6 * num_weights * self.autoencoder_steps * self.sample_rate * size
        generator_flops = (
            6
            * self.steps
            * self.batch_per_class
            * spec.num_classes
            * (
                self.hidden_dim * (self.hidden_dim + 20)
                + self.feature_batch_size * self.autoencoder_dim
            )
        )
        batch_features = min(self.feature_batch_size, self.num_features)
        return {
            "signal_to_noise_of_an_autoencoder_step": signal_to_noise,
            "floating_point_operations": autoencoder_flops
            + 2 * size * self.num_features * self.autoencoder_dim
            + generator_flops,
            "elementwise_operations": ELEMENTWISE_PASSES
            * self.steps
            * self.batch_per_class
            * spec.num_classes
            * batch_features,
            "operator_calls": self.steps * CALLS_PER_STEP
            + self.autoencoder_steps * CALLS_PER_AUTOENCODER_STEP,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Train an autoencoder, query the mean embedding of latent vectors, and fit a generator.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        spec = gate.spec
        device = streams.runtime.torch_device
        autoencoder = self._train_autoencoder(gate, streams, progress)
        count_share = choose_count_share(spec)
        # Latent vectors have norm sqrt(autoencoder_dim), the unit of the bandwidths.
        frequencies = draw_frequencies(
            self.autoencoder_dim,
            self.num_features,
            self.bandwidths,
            math.sqrt(self.autoencoder_dim),
            streams.make_rng("features"),
        ).to(device)
        progress("embedding the latent vectors", 0, 1)
        noisy_sum = gate.sum(
            "embedding",
            embed_latent,
            autoencoder.encoder,
            detach_weights(autoencoder.encoder),
            frequencies,
            count_share,
            clip_norm=1.0,
            per_class=True,
        )
        progress("embedding the latent vectors", 1, 1)
        config = self.generator_config(spec)
        net = self._build_generator(config, autoencoder, streams)
        fit_generator(
            net.generate_latents,
            net.layers.parameters(),
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
        return Artifact.from_generator("AutoencoderGenerator", config, net.eval())

    def generator_config(self, spec: Spec) -> dict[str, Any]:
        """Return the arguments of the generator."""
        return {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": self.latent_dim,
            "hidden_dim": self.hidden_dim,
            "autoencoder_dim": self.autoencoder_dim,
            "autoencoder_hidden_dim": self.autoencoder_hidden_dim,
            "num_frequencies": self.num_frequencies,
        }

    def _build_generator(
        self, config: dict[str, Any], autoencoder: Autoencoder, streams: Streams
    ) -> Any:
        """Build the generator of latent vectors, with the trained decoder.

        Args:
            config: Arguments of the generator.
            autoencoder: The trained autoencoder.
            streams: Public random streams.

        Returns:
            The generator, in training mode.
        """
        net: Any = initialize_weights(
            GENERATORS["AutoencoderGenerator"](**config), streams.make_rng("weights")
        ).to(streams.runtime.torch_device)
        net.decoder.load_state_dict(autoencoder.decoder.state_dict())
        return net.train()

    def _train_autoencoder(self, gate: Gate, streams: Streams, progress: Progress) -> Autoencoder:
        """Train the autoencoder by DP-SGD, one query for each step.

        Args:
            gate: The gate in front of the records.
            streams: Public random streams and checkpoints.
            progress: Shows the progress.

        Returns:
            The autoencoder.
        """
        net: nn.Module = initialize_weights(
            Autoencoder(
                gate.spec.shape,
                self.autoencoder_dim,
                self.autoencoder_hidden_dim,
                self.num_frequencies,
            ),
            streams.make_rng("autoencoder"),
        )
        return train_privately(
            gate,
            net,
            steps=self.autoencoder_steps,
            learning_rate=self.autoencoder_learning_rate,
            clip_norm=self.autoencoder_clip_norm,
            streams=streams,
            progress=progress,
        )


METHOD = DPMERFAutoencoder
