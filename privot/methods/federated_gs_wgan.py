r"""Federated GS-WGAN: a generator trained by noisy gradients of critics that stay with clients.

**Released** by each queried client, for each generated image that it received: the input gradient
of its critic at that image, with noise.
**Bound** a gradient is clipped to norm 1. With ``unit="client"`` all records of a client may
change, and with them each of its gradients, by 2 at most. With ``unit="record"`` a client has
``num_critics`` critics, one is drawn secretly for each image, and replacing one record changes one
of them.
**Cost** of one client: its gradients compose, as Gaussian queries (client) or as Gaussian queries
on one of ``num_critics`` shards each (record). Other clients hold other records, so their costs are
not added. The choice of clients amplifies nothing, since the server knows which clients it queries.
**Departs** from the paper as `gs-wgan` does; every gradient that a client sends is counted; clients
are queried in turn, equally often.
**Notation** the noise multiplier is that of one gradient: each coefficient has noise of standard
deviation 2 * noise_multiplier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from privot.components.client_critics import ClientCritics
from privot.components.critic_training import CRITIC_STEPS_PER_WARMUP_ROUND
from privot.components.federated_settings import FederatedSettings, require_clients
from privot.components.pretraining import validate_pretrain
from privot.components.server_generator import ServerGenerator
from privot.components.sharded_critics import GS_WGAN_CITATION
from privot.components.sharded_gan import (
    CALLS_PER_STEP,
    GENERATOR_CLASSES,
    OPERATIONS_PER_MAP_ELEMENT,
)
from privot.data.spec import Spec
from privot.nets import flops_per_image
from privot.nets.functional_critic import Critic
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Full, Shards
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams


@dataclass(frozen=True, kw_only=True)
class FederatedGSWGAN(FederatedSettings):
    """Clients' critics whose gradients train a server's generator.

    >>> spec = Spec((1, 28, 28), 62, num_clients=300)
    >>> plan = FederatedGSWGAN(noise_multiplier=10.0, rounds=100).plan(spec)
    >>> plan.stages[0].steps, round(plan.cost().epsilon(1.15e-3), 1)
    (6200, 54.2)
    """

    name: ClassVar[str] = "federated-gs-wgan"
    title: ClassVar[str] = (
        "GS-WGAN for clients: critics stay with their data and send only noisy gradients"
    )
    trusted_party: ClassVar[str] = "nobody: every client has its own gate and adds its own noise"
    guarantee_summary: ClassVar[str] = (
        "(epsilon, delta) for all records of one client, or for one record"
    )
    citation: ClassVar[str] = GS_WGAN_CITATION

    def plan(self, spec: Spec) -> Plan:
        """Plan the queries of one client."""
        validate_pretrain(self.name, self.pretrain, spec)
        turns = math.ceil(self.rounds / self.count_groups(require_clients(spec, self.name)))
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        queries = turns * self.batch_per_class * spec.num_classes
        if self.unit == "record":
            sampling = Shards(self.num_critics)
            return Plan(
                (Stage(self.stage, "query_clients", noise_multiplier, queries, sampling),),
                Neighbours.REPLACE,
            )
        return Plan(
            (Stage(self.stage, "query_clients", noise_multiplier, queries, Full()),),
            Neighbours.CLIENT,
        )

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        critic = Critic(spec.shape, spec.num_classes, self.critic_channels)
        num_clients = spec.num_clients or 1
        queries = plan.stages[0].steps
        images_per_client = self.batch_per_class * spec.num_classes
        turns = queries // images_per_client
        warmup_steps = CRITIC_STEPS_PER_WARMUP_ROUND * self.warmup_rounds
        total_critic_steps = (
            (turns * self.critic_steps + warmup_steps) * num_clients * self.critics_per_client
        )
        passes = 3.0 * num_clients * queries + 14.0 * total_critic_steps * self.critic_batch_size
        generator_config = {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": self.latent_dim,
            "channels": self.generator_channels,
        }
        generator_flops = (
            3.0
            * self.rounds
            * min(self.clients_per_round or num_clients, num_clients)
            * images_per_client
            * flops_per_image(GENERATOR_CLASSES[self.generator], generator_config)
        )
        return {
            "floating_point_operations": critic.flops * passes + generator_flops,
            "elementwise_operations": critic.flops * passes / OPERATIONS_PER_MAP_ELEMENT,
            "operator_calls": CALLS_PER_STEP * (turns * (1 + self.critic_steps) + warmup_steps),
            # Of one client in a round: bytes of the pixels it receives and of the float32 gradients
            # it sends; and bytes of memory on its own machine.
            "bytes_down": images_per_client * spec.num_features,
            "bytes_up": 4 * images_per_client * math.prod(self.compute_gradient_shape(spec)),
            "memory_of_a_client": round(self.estimate_memory(spec)),
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Simulate the whole federation in one process: all clients behind one gate.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        num_clients = gate.spec.num_clients or 1
        queries_per_turn = self.batch_per_class * gate.spec.num_classes
        num_groups = self.count_groups(num_clients)
        num_made = gate.plan.stages[0].steps - gate.count_remaining_queries(self.stage)
        first_turn = num_made // queries_per_turn
        server = ServerGenerator(self, gate.spec, streams, progress)
        clients = ClientCritics(
            gate,
            self,
            streams,
            progress,
            is_warmed_up=first_turn > 0 and server.restore(streams.load_checkpoint("generator")),
        )
        # A resumed run starts with the next turn of the first group.
        for round_number in range(first_turn * num_groups, self.rounds):
            client_indices = self.schedule_clients(round_number, num_clients)
            images = server.generate_images(round_number, client_indices)
            gradients = clients.query_gradients(
                client_indices, images, round_number // num_groups
            ).float()
            server.apply_gradients(gradients)
            progress("training the generator", round_number + 1, self.rounds)
            if streams.is_checkpoint_due(round_number, self.rounds):
                # The critics are saved first: a run with a generator checkpoint skips the warm-up.
                gate.save_shard_states()
                streams.save_checkpoint("generator", server.state_dict())
                streams.save_preview(server.sample_images(10), 10)
        return server.export_artifact()


METHOD = FederatedGSWGAN
