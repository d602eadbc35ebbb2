r"""FedAvg GAN: clients train the current critic; a trusted server sums the changes of its weights.

**Released** in each round: the sum over all clients of the change of the critic's weights, with
noise. The generator is trained by that critic.
**Bound** a client's change is clipped to ``clip_norm``; replacing a client changes the sum by
2 * ``clip_norm`` at most.
**Cost** one full-batch Gaussian query in each round, under client neighbours: all records of one
client may be replaced.
**Departs** from DP-FedAvg-GAN: all clients are queried in every round (the server knows whom it
queries, so sampling clients amplifies nothing here); the critic and its loss are those of DP-GAN.
**Notation** critic D with weights w, generator G, l(t) = log(1 + e^t). Client k takes
``critic_steps`` steps on E l(-D(x, y)) + E l(D(G(z, y), y)) from w to w_k. The server moves w by
the mean over clients of clip(w_k - w), whose sum has noise of standard deviation 2 *
noise_multiplier * clip_norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from privot.components.dp_sgd import flatten_tensors
from privot.components.fedavg_critic import (
    get_weight_change,
    score_images,
    train_client_critic,
)
from privot.components.federated_settings import require_clients
from privot.components.method_base import MethodBase
from privot.components.validation import require_noise_multiplier, require_positive, require_range
from privot.data.spec import Spec
from privot.nets import GENERATORS, flops_per_image, initialize_weights
from privot.nets.dp_critic import PrivateCritic, count_critic_multiplications
from privot.nets.ema import EmaTrainer
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

FAKES_PER_CLASS = 32  # generated images of each class that clients receive in a round
CALLS_PER_STEP = 600  # calls of tensor operators in a step of all clients or of the generator
ADAM_BETAS = (0.0, 0.99)  # of the generator's Adam


@dataclass(frozen=True, kw_only=True)
class FedAvgGAN(MethodBase):
    """Settings of the FedAvg GAN.

    >>> spec = Spec((1, 28, 28), 62, num_clients=300)
    >>> plan = FedAvgGAN(noise_multiplier=2.0, rounds=100).plan(spec)
    >>> round(plan.cost().epsilon(1.15e-3), 1), str(plan.neighbours)
    (27.0, 'client')
    """

    name: ClassVar[str] = "federated-average-gan"
    title: ClassVar[str] = (
        "FedAvg GAN: a generator from a critic whose clients' updates are clipped and summed"
    )
    trusted_party: ClassVar[str] = (
        "the server, which receives each client's update before the noise"
    )
    guarantee_summary: ClassVar[str] = (
        "(epsilon, delta) for all records of one client, Gaussian queries"
    )
    stage: ClassVar[str] = "updates"
    citation: ClassVar[str] = """@inproceedings{augenstein2020generative,
  title     = {Generative Models for Effective {ML} on Private, Decentralized Datasets},
  author    = {Augenstein, Sean and McMahan, H. Brendan and Ramage, Daniel and Ramaswamy, Swaroop
               and Kairouz, Peter and others},
  booktitle = {International Conference on Learning Representations},
  year      = {2020}
}"""

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "generator_channels": 8,
        "batch_size": 64,
        "rounds": 30,
    }

    noise_multiplier: float | None = None  # of one round; None: calibrated to the budget
    rounds: int = 200  # communication rounds
    critic_steps: int = 8  # steps of a client's critic in a round
    critic_batch_size: int = 32  # records of a client in a critic step
    critic_learning_rate: float = 0.15  # learning rate of the clients' gradient descent
    clip_norm: float = 0.3  # largest norm of a client's change
    server_learning_rate: float = 1.0  # factor on the mean change; momentum did not help
    records_per_client: int = 128  # records of each client: more are cut, fewer are repeated
    generator_steps: int = 8  # generator steps in a round
    batch_size: int = 512  # generated images in a generator step
    critic_channels: int = 16  # channels after the critic's first layer; they double in each layer
    latent_dim: int = 64  # dimension of the generator's latent vectors
    generator_channels: int = 48  # channels of the generator's last feature maps
    generator_learning_rate: float = 5e-4  # learning rate of the generator's Adam
    ema_decay: float = 0.99  # decay per generator step of the generator's averaged weights

    def __post_init__(self) -> None:
        require_positive(
            self,
            "rounds",
            "critic_steps",
            "critic_batch_size",
            "generator_steps",
            "records_per_client",
            "critic_channels",
            "latent_dim",
            "generator_channels",
        )
        require_range(self, "batch_size", minimum=2)  # batch norm needs two images
        require_range(
            self,
            "clip_norm",
            "server_learning_rate",
            "critic_learning_rate",
            above=0,
            below=math.inf,
        )
        require_range(self, "generator_learning_rate", above=0, below=1)
        require_range(self, "ema_decay", minimum=0, below=1)
        require_noise_multiplier(self)

    def plan(self, spec: Spec) -> Plan:
        require_clients(spec, self.name)
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        stage = Stage(self.stage, "sum_over_shards", noise_multiplier, self.rounds)
        return Plan((stage,), Neighbours.CLIENT)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        with torch.device("meta"):
            critic = PrivateCritic(spec.shape, spec.num_classes, self.critic_channels)
            net = GENERATORS["DcganGenerator"](**self.generator_config(spec))
        num_weights = _count_parameters(critic)
        num_clients = spec.num_clients or 1
        noise_multiplier = plan.stages[0].noise_multiplier
        # Noise of the mean change over its largest possible norm.
        noise_to_signal = 2 * noise_multiplier * math.sqrt(num_weights) / num_clients
        # Forward and backward are three passes. A critic step has a record and a generated image.
        critic_flops = 2 * count_critic_multiplications(spec.shape, self.critic_channels)
        generator_flops = flops_per_image("DcganGenerator", self.generator_config(spec))
        client_flops = (
            num_clients * self.critic_steps * self.critic_batch_size * 2 * 3 * critic_flops
        )
        server_flops = (
            self.generator_steps * self.batch_size * 3 * (generator_flops + critic_flops)
            + FAKES_PER_CLASS * spec.num_classes * generator_flops
        )
        return {
            "noise_to_signal_of_a_round": noise_to_signal,
            "floating_point_operations": self.rounds * (client_flops + server_flops),
            "operator_calls": self.rounds
            * CALLS_PER_STEP
            * (self.critic_steps + self.generator_steps),
            **_count_message_bytes(critic, net),
        }

    def generator_config(self, spec: Spec) -> dict[str, Any]:
        """Return the arguments of the generator."""
        return {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": self.latent_dim,
            "channels": self.generator_channels,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Train a critic by noisy federated averages, and a generator on the critic.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        training = _FedAvgTraining(self, gate, streams)
        training.train(progress)
        return Artifact.from_generator(
            "DcganGenerator",
            self.generator_config(gate.spec),
            training.finalize_generator(),
            _count_message_bytes(training.critic, training.generator_trainer.net),
        )


class _FedAvgTraining:
    """The server's state: the critic's weights and the generator.

    Args:
        method: The settings.
        gate: The gate in front of the clients' records.
        streams: Public random streams and checkpoints.
    """

    def __init__(self, method: FedAvgGAN, gate: Gate, streams: Streams):
        self.method = method
        self.gate = gate
        self.streams = streams
        spec = gate.spec
        device = streams.runtime.torch_device
        self.device = device
        self.num_classes = spec.num_classes
        net = initialize_weights(
            GENERATORS["DcganGenerator"](**method.generator_config(spec)),
            streams.make_rng("weights"),
        ).to(device)
        self.critic = initialize_weights(
            PrivateCritic(spec.shape, spec.num_classes, method.critic_channels),
            streams.make_rng("critic"),
        ).to(device)
        self.critic.requires_grad_(False)
        self.generator_trainer = EmaTrainer(
            net.train(), method.generator_learning_rate, ADAM_BETAS, method.ema_decay
        )
        self.weights = flatten_tensors(self.critic.parameters())
        self.first_round = method.rounds - gate.count_remaining_queries(method.stage)
        # If the gate stores its results, it repeats them from the first, and training starts anew.
        checkpoint = streams.load_checkpoint("game") if self.first_round else None
        if checkpoint is not None and self.generator_trainer.restore(checkpoint):
            self.weights = checkpoint["weights"]
        # A resumed run uses a fresh stream.
        self.rng = streams.make_rng(f"draws from {self.first_round}", device)
        self.num_clients = int(spec.num_clients or 0)
        gate.split_into_shards(
            self.num_clients,
            {"weight_change": torch.zeros(self.num_clients, len(self.weights))},
            method.records_per_client,
        )
        self.balanced_labels = torch.arange(self.num_classes, device=device).repeat_interleave(
            FAKES_PER_CLASS
        )

    def train(self, progress: Progress) -> None:
        """Run the remaining rounds."""
        for round_number in range(self.first_round, self.method.rounds):
            with torch.no_grad():
                fakes = self._generate(self.generator_trainer.net, self.balanced_labels).unflatten(
                    0, (self.num_classes, FAKES_PER_CLASS)
                )
            self._train_critic(fakes)
            self._train_generator()
            progress("training generator and critic", round_number + 1, self.method.rounds)
            if self.streams.is_checkpoint_due(round_number, self.method.rounds):
                self.streams.save_checkpoint(
                    "game", self.generator_trainer.state_dict() | {"weights": self.weights}
                )
                self.streams.save_preview(fakes[:, :10].flatten(0, 1), 10)

    def finalize_generator(self) -> nn.Module:
        """Return the generator with averaged weights."""
        return self.generator_trainer.recalibrate(
            lambda net: self._generate(net, self.balanced_labels)
        )

    def _generate(self, net: Any, labels: Tensor) -> Tensor:
        latents = torch.randn(
            len(labels), self.method.latent_dim, generator=self.rng, device=self.device
        )
        return net(latents, labels)

    def _train_critic(self, fakes: Tensor) -> None:
        """Move the critic's weights by the noisy mean of all clients' changes."""
        method = self.method
        size = (method.critic_steps, method.critic_batch_size)
        record_fractions = torch.rand(size, generator=self.rng, device=self.device)
        fake_indices = torch.randint(FAKES_PER_CLASS, size, generator=self.rng, device=self.device)
        self.gate.update_shards(
            train_client_critic,
            self.critic,
            self.weights,
            fakes,
            record_fractions,
            fake_indices,
            method.critic_learning_rate,
            records_per_step=method.critic_batch_size,
        )
        # privacy: the number of clients is public and all of them are in every sum, so the mean
        # reveals no more than the sum.
        noisy_sum = self.gate.sum_over_shards(
            method.stage, get_weight_change, clip_norm=method.clip_norm
        )
        mean_change = noisy_sum.float() / self.num_clients
        self.weights = self.weights + method.server_learning_rate * mean_change

    def _train_generator(self) -> None:
        """Take the generator steps of a round."""
        method = self.method
        for _ in range(method.generator_steps):
            labels = torch.randint(
                self.num_classes, (method.batch_size,), generator=self.rng, device=self.device
            )
            images = self._generate(self.generator_trainer.net, labels)
            scores = score_images(self.weights, self.critic, images, labels)
            softplus(-scores).mean().backward()
            self.generator_trainer.step()


def _count_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def _count_message_bytes(critic: nn.Module, net: nn.Module) -> dict[str, int]:
    """Count the bytes that a client sends and receives in a round, as float32."""
    return {
        "bytes_per_client_and_round": 4 * _count_parameters(critic),
        "bytes_to_a_client_in_a_round": 4 * (_count_parameters(critic) + _count_parameters(net)),
    }


METHOD = FedAvgGAN
