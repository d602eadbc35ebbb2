r"""DP-GAN: a conditional GAN whose critic is trained by DP-SGD; the generator sees the critic only.

**Released** at each step: one noisy sum of the critic's gradients over a Poisson sample of the
records. Critic and generator are computed from these sums.
**Bound** each record's gradient, plus the public gradient of the generated images, is clipped to
``clip_norm`` by the gate.
**Cost** ``steps`` Gaussian queries on Poisson samples, under add-remove. Generator steps are
post-processing, in any number.
**Departs** from the paper: few steps on large samples instead of many on small ones; a small
critic; the gradient of the generated images is added to each record's before clipping, so that
their difference is clipped and no batch size has to be known.
**Notation** critic D(x, y), generator G(z, y), softplus loss l(t) = log(1 + e^t). D minimizes
E l(-D(x, y)) + E l(D(G(z, y), y)); G minimizes E l(-D(G(z, y), y)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from privot.components.dp_sgd import dp_sgd_step, flatten_tensors
from privot.components.method_base import MethodBase
from privot.components.validation import require_noise_multiplier, require_positive, require_range
from privot.data.spec import Spec
from privot.nets import GENERATORS, initialize_weights
from privot.nets.dp_critic import PrivateCritic, count_critic_multiplications
from privot.nets.ema import EmaTrainer, collect_state, restore_state
from privot.nets.generators.dcgan import count_doublings
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

# Calls of tensor operators that take as long as a step of both networks, since records are clipped
# one by one.
CALLS_PER_STEP = 7000
# Momentum makes the two networks oscillate. The second moment is that of the noise, which is
# constant.
ADAM_BETAS = (0.0, 0.99)


def record_critic_loss(critic: Any, image: Tensor, label: Tensor) -> Tensor:
    """Compute the critic's loss on one record.

    Args:
        critic: The critic, a function of batches.
        image: The image [1, channels, height, width].
        label: Its label [1].

    Returns:
        The loss [].
    """
    return softplus(-critic(image, label)).sum()


@dataclass(frozen=True, kw_only=True)
class DPGAN(MethodBase):
    """Settings of DP-GAN.

    >>> plan = DPGAN(noise_multiplier=3.0, steps=10).plan(Spec((1, 28, 28), 10))
    >>> plan.stages[0].sampling, plan.stages[0].steps
    (Poisson(sample_rate=0.06), 10)
    """

    name: ClassVar[str] = "dp-gan"
    title: ClassVar[str] = "DP-GAN: a generator from a critic trained by DP-SGD"
    trusted_party: ClassVar[str] = "the data owner"
    guarantee_summary: ClassVar[str] = "(epsilon, delta), sampled Gaussian queries"
    citation: ClassVar[str] = """@article{bie2023private,
  title   = {Private {GANs}, Revisited},
  author  = {Bie, Alex and Kamath, Gautam and Zhang, Guojun},
  journal = {Transactions on Machine Learning Research},
  year    = {2023}
}
@article{xie2018dpgan,
  title   = {Differentially Private Generative Adversarial Network},
  author  = {Xie, Liyang and Lin, Kaixiang and Wang, Shu and Wang, Fei and Zhou, Jiayu},
  journal = {arXiv preprint arXiv:1802.06739},
  year    = {2018}
}"""

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "generator_channels": 16,
        "steps": 250,
        "batch_size": 64,
        "critic_channels": 8,
    }

    noise_multiplier: float | None = None  # noise over sensitivity; None: calibrated to the budget
    sample_rate: float = 0.06  # probability of each record to be in a step; 3,600 of 60,000 records
    steps: int = 10_000  # critic steps, one query each
    clip_norm: float = 1.0  # largest norm of a record's gradient; at the start norms are 1 to 2
    critic_steps: int = 1  # initial number of critic steps for each generator step
    balance_interval: int = 100  # generator steps between two checks of the balance
    # At each check the number of critic steps is doubled if the critic recognizes at most this
    # fraction of the generated images.
    balance_threshold: float = 0.6
    critic_channels: int = 32  # channels after the critic's first layer; they double in each layer
    generator_channels: int = 48  # channels of the generator's last feature maps
    latent_dim: int = 64  # dimension of the generator's latent vectors
    batch_size: int = 512  # generated images in a critic or generator step
    critic_learning_rate: float = 1e-3  # learning rate of the critic's Adam, the larger of the two
    generator_learning_rate: float = 5e-4  # learning rate of the generator's Adam
    ema_decay: float = 0.998  # decay per generator step of the generator's averaged weights

    def __post_init__(self) -> None:
        require_positive(
            self,
            "steps",
            "critic_steps",
            "balance_interval",
            "critic_channels",
            "generator_channels",
            "latent_dim",
        )
        require_range(self, "batch_size", minimum=2)  # batch norm needs two images
        require_range(self, "sample_rate", above=0, maximum=1)
        require_range(self, "clip_norm", above=0, below=math.inf)
        require_range(self, "critic_learning_rate", "generator_learning_rate", above=0, below=1)
        require_range(self, "ema_decay", minimum=0, below=1)
        require_range(self, "balance_threshold", minimum=0, maximum=1)
        require_noise_multiplier(self)

    def plan(self, spec: Spec) -> Plan:
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        stage = Stage("critic", "sum", noise_multiplier, self.steps, Poisson(self.sample_rate))
        return Plan((stage,), Neighbours.ADD_REMOVE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        with torch.device("meta"):
            critic = PrivateCritic(spec.shape, spec.num_classes, self.critic_channels)
        num_weights = sum(parameter.numel() for parameter in critic.parameters())
        num_pixels = spec.num_features / spec.shape[0]
        sample_size = self.sample_rate * spec.size if spec.size else None
        critic_flops = 2 * count_critic_multiplications(spec.shape, self.critic_channels)
        num_doublings = count_doublings(*spec.shape[1:])
        generator_flops = 2 * 9 * 2 * num_doublings * self.generator_channels**2 * num_pixels
        steps = plan.stages[0].steps
        flops = steps * (
            3 * critic_flops * ((sample_size or 0) + self.batch_size)
            + self.batch_size * generator_flops * (1 + 3 / self.critic_steps)
        )
        noise_std = plan.stages[0].noise_multiplier * self.clip_norm
        signal_to_noise = (
            self.clip_norm * sample_size / (noise_std * math.sqrt(num_weights))
            if sample_size and noise_std
            else None
        )
        return {
            "weights_of_the_critic": num_weights,
            "signal_to_noise_of_a_step": signal_to_noise,
            "floating_point_operations": flops,
            "operator_calls": steps * CALLS_PER_STEP,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Train a critic by DP-SGD, and a generator on the critic.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        spec = gate.spec
        device = streams.runtime.torch_device
        config = {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": self.latent_dim,
            "channels": self.generator_channels,
        }
        net = initialize_weights(
            GENERATORS["DcganGenerator"](**config), streams.make_rng("weights")
        ).to(device)
        critic = initialize_weights(
            PrivateCritic(spec.shape, spec.num_classes, self.critic_channels),
            streams.make_rng("critic"),
        ).to(device)
        training = _GanTraining(self, net, critic, spec, device)
        training.train(gate, streams, progress)
        return Artifact.from_generator(
            "DcganGenerator", config, training.finalize_generator(streams)
        )


class _GanTraining:
    """The state of both networks. All of it is public, since the records enter through the gate.

    Args:
        method: The settings.
        net: The generator.
        critic: The critic.
        spec: Spec of the data.
        device: Device of the networks.
    """

    def __init__(
        self, method: DPGAN, net: nn.Module, critic: nn.Module, spec: Spec, device: torch.device
    ):
        self.method = method
        self.critic = critic.train()
        self.device = device
        self.classes = spec.num_classes
        # Labels are sampled in the declared proportions, or uniformly.
        sizes = torch.tensor(spec.class_sizes or (1,) * spec.num_classes, dtype=torch.float64)
        self.label_cdf = (sizes.cumsum(0) / sizes.sum()).to(device)
        self.generator_trainer = EmaTrainer(
            net.train(), method.generator_learning_rate, ADAM_BETAS, method.ema_decay
        )
        self.critic_optimizer = torch.optim.Adam(
            critic.parameters(), lr=method.critic_learning_rate, betas=ADAM_BETAS
        )
        self.critic_steps = method.critic_steps  # current number for each generator step
        self.steps_since_generator = 0  # critic steps since the last generator step
        # Sum, since the last check, of the fractions of generated images that the critic
        # recognized.
        self.recognized_fakes = torch.zeros((), device=device)

    def train(self, gate: Gate, streams: Streams, progress: Progress) -> None:
        """Take one critic step for each remaining query.

        Args:
            gate: The gate in front of the records.
            streams: Public random streams and checkpoints.
            progress: Shows the progress.
        """
        steps = self.method.steps
        first_step = steps - gate.count_remaining_queries("critic")
        # If the gate stores its results, it repeats them from the first, and training starts anew.
        checkpoint = streams.load_checkpoint("game")
        if checkpoint is not None and int(checkpoint["step"]) <= first_step:
            self._load_state(checkpoint)
        # A resumed run uses a fresh stream.
        self.rng = streams.make_rng(f"codes from {first_step}", self.device)
        for step in range(first_step, steps):
            dp_sgd_step(
                gate,
                "critic",
                self.critic,
                record_critic_loss,
                self.critic_optimizer,
                clip_norm=self.method.clip_norm,
                public_gradient=self._compute_fake_gradient(),
            )
            self.steps_since_generator += 1
            if self.steps_since_generator >= self.critic_steps:
                self._train_generator()
            if step % 25 == 24 or step + 1 == steps:
                progress(
                    "training generator and critic",
                    step + 1,
                    steps,
                    critic_steps_per_generator_step=self.critic_steps,
                )
            if streams.is_checkpoint_due(step, steps):
                streams.save_checkpoint("game", self._state_dict(step + 1))
                self._save_preview(streams)

    def _generate_batch(self, net: nn.Module) -> tuple[Tensor, Tensor]:
        """Generate images [batch, channels, height, width] and their labels [batch]."""
        count = self.method.batch_size
        device = self.device
        uniform = torch.rand(count, generator=self.rng, device=device, dtype=torch.float64)
        labels = torch.searchsorted(self.label_cdf, uniform, right=True).clamp(max=self.classes - 1)
        latents = torch.randn(count, self.method.latent_dim, generator=self.rng, device=device)
        return net(latents, labels), labels

    def _compute_fake_gradient(self) -> Tensor:
        """Compute the gradient of the critic's mean loss on generated images: [num_weights]."""
        with torch.no_grad():
            images, labels = self._generate_batch(self.generator_trainer.net)
        loss = softplus(self.critic(images, labels)).mean()
        return flatten_tensors(torch.autograd.grad(loss, list(self.critic.parameters())))

    def _train_generator(self) -> None:
        """Take one generator step, and check the balance of both networks if it is due."""
        images, labels = self._generate_batch(self.generator_trainer.net)
        self.critic.requires_grad_(False)
        scores = self.critic(images, labels)
        softplus(-scores).mean().backward()
        self.generator_trainer.step()
        self.critic.requires_grad_(True)
        self.recognized_fakes += (scores.detach() < 0).float().mean()
        self.steps_since_generator = 0
        interval = self.method.balance_interval
        if self.generator_trainer.steps % interval == 0:
            # privacy: the balance uses generated images only. How well the critic recognizes
            # records would be one more query.
            if float(self.recognized_fakes) <= self.method.balance_threshold * interval:
                self.critic_steps *= 2
            self.recognized_fakes.zero_()

    def _save_preview(self, streams: Streams) -> None:
        """Save ten images of each class, generated by the averaged weights."""
        labels = torch.arange(self.classes, device=self.device).repeat_interleave(10)
        # The images have a stream of their own. When they are shown depends on the clock, and the
        # release must not depend on it.
        latents = torch.randn(
            len(labels),
            self.method.latent_dim,
            generator=streams.make_rng("shown", self.device),
            device=self.device,
        )
        with torch.no_grad():
            streams.save_preview(self.generator_trainer.ema_net(latents, labels), 10)

    def finalize_generator(self, streams: Streams) -> nn.Module:
        """Return the generator with averaged weights."""
        self.rng = streams.make_rng("settling", self.device)
        return self.generator_trainer.recalibrate(self._generate_batch)

    def _state_dict(self, step: int) -> dict[str, Tensor]:
        return self.generator_trainer.state_dict() | collect_state(
            critic=self.critic,
            critic_optimizer=self.critic_optimizer,
            step=step,
            critic_steps=self.critic_steps,
            steps_since_generator=self.steps_since_generator,
            recognized_fakes=self.recognized_fakes,
        )

    def _load_state(self, state: dict[str, Tensor]) -> None:
        self.generator_trainer.restore(state)
        restore_state(state, critic=self.critic, critic_optimizer=self.critic_optimizer)
        self.critic_steps = int(state["critic_steps"])
        self.steps_since_generator = int(state["steps_since_generator"])
        self.recognized_fakes = state["recognized_fakes"].clone()


METHOD = DPGAN
