"""The server's side: a generator that sends images to clients and is trained by their gradients.

It receives only noisy query results, so everything here is public and may be stored or sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from privot.components.critic_gradients import build_gradient_basis
from privot.components.federated_settings import FederatedSettings
from privot.components.pretraining import pretrain_generator
from privot.components.sharded_gan import ADAM_BETAS, FAKES_PER_CLASS, GENERATOR_CLASSES
from privot.data.spec import Spec
from privot.nets import GENERATORS, initialize_weights
from privot.nets.ema import EmaTrainer
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams, ignore_progress

CHUNK_SIZE = 1024  # images in a forward pass: a batch of batch norm, and a limit of the memory
NORM_CALIBRATION_IMAGES = 320  # images of a batch when batch-norm statistics are recomputed


class ServerGenerator:
    """A generator with its optimizer.

    A round is `generate_images`, then `apply_gradients`. The images depend on the seed, the round
    and the gradients so far. Pixels are sent as bytes; the backward pass ignores their rounding.

    Args:
        settings: Settings of the federation.
        spec: Spec of the data.
        streams: Public random streams and checkpoints.
        progress: Shows the progress of the pretraining.
    """

    def __init__(
        self,
        settings: FederatedSettings,
        spec: Spec,
        streams: Streams,
        progress: Progress = ignore_progress,
    ):
        self.settings = settings
        self.spec = spec
        self.streams = streams
        self.device = streams.runtime.torch_device
        self.generator_config = {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": settings.latent_dim,
            "channels": settings.generator_channels,
        }
        net = initialize_weights(
            GENERATORS[GENERATOR_CLASSES[settings.generator]](**self.generator_config),
            streams.make_rng("weights"),
        ).to(self.device)
        pretrain_generator(net, settings.pretrain, settings.pretrain_steps, spec, streams, progress)
        self.trainer = EmaTrainer(
            net, settings.generator_learning_rate, ADAM_BETAS, settings.ema_decay
        )
        self.row_basis, self.column_basis = (
            build_gradient_basis(side, settings.frequency_fraction, settings.window_size).to(
                self.device
            )
            for side in spec.shape[1:]
        )
        # Pixels that no gradient can change [height, width].
        self._fixed_margin = ~(
            (self.row_basis != 0).any(1)[:, None] & (self.column_basis != 0).any(1)
        )
        self._labels = torch.arange(spec.num_classes, device=self.device).repeat_interleave(
            settings.batch_per_class
        )
        self._latents = torch.empty(0)  # of the current round

    def generate_images(self, round_number: int, client_indices: Sequence[int]) -> Tensor:
        """Generate the images of a round.

        Args:
            round_number: Number of the round, from 0.
            client_indices: Indices of the clients that receive images.

        Returns:
            Images as uint8 [clients, classes, batch_per_class, channels, height, width].
        """
        shape = (self.spec.num_clients or 1, len(self._labels), self.settings.latent_dim)
        all_latents = torch.randn(
            shape,
            generator=self.streams.make_rng(f"codes of round {round_number}", self.device),
            device=self.device,
        )
        self._latents = (
            all_latents
            if list(client_indices) == list(range(len(all_latents)))
            else all_latents[torch.tensor(client_indices, device=self.device)]
        )
        with torch.no_grad():
            images = torch.cat(
                [(255 * images).round().byte() for images, _ in self._generate_chunks()]
            )
        return images.view(
            len(client_indices),
            self.spec.num_classes,
            self.settings.batch_per_class,
            *self.spec.shape,
        )

    def _generate_chunks(self) -> Iterable[tuple[Tensor, slice]]:
        """Generate the images of the current round in chunks, each with its slice."""
        latents = self._latents.flatten(0, 1)
        labels = self._labels.repeat(len(self._latents))
        for start in range(0, len(latents), CHUNK_SIZE):
            chunk = slice(start, start + CHUNK_SIZE)
            yield self.trainer.net(latents[chunk], labels[chunk]), chunk

    def apply_gradients(self, gradients: Tensor, answer_mask: Tensor | None = None) -> None:
        """Take one generator step along the clients' gradients. All clients have the same weight.

        Args:
            gradients: Gradients in DCT coefficients
                [clients, classes, batch_per_class, channels, rows, columns].
            answer_mask: Which clients sent gradients [clients]; the values of the others are
                ignored. None: all clients did.
        """
        num_clients = len(gradients) if answer_mask is None else int(answer_mask.sum())
        if answer_mask is not None:
            gradients = torch.where(
                answer_mask.to(gradients.device).view(-1, 1, 1, 1, 1, 1), gradients, 0
            )
        pixel_gradients = (
            self.row_basis
            @ gradients.flatten(0, 2).float()
            @ self.column_basis.T
            / (max(num_clients, 1) * len(self._labels))
        )
        for images, chunk in self._generate_chunks():
            margin_gradient = self._margin_gradient(images.detach()) / len(pixel_gradients)
            images.backward(margin_gradient - pixel_gradients[chunk])
        self.trainer.step()

    def _margin_gradient(self, images: Tensor) -> Tensor | float:
        """Compute a public gradient of norm 1 at most that pulls the fixed margin to black.

        No client's gradient reaches the margin, so without this gradient a generator that was not
        pretrained would fill it with anything. A pretrained generator knows the margin already.
        """
        if self.settings.pretrain != "off":
            return 0.0
        margin = images * self._fixed_margin
        return margin / margin.flatten(1).norm(dim=1).clamp(min=1).view(-1, 1, 1, 1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state between two rounds, as tensors by name."""
        return self.trainer.state_dict()

    def restore(self, state: dict[str, Tensor] | None) -> bool:
        """Load the state of `state_dict`; return whether there is one."""
        return self.trainer.restore(state)

    def sample_images(self, images_per_class: int = FAKES_PER_CLASS) -> Tensor:
        """Generate images of each class by the averaged weights, from the same latents every time.

        Returns:
            Images [classes * images_per_class, channels, height, width].
        """
        # The images have a stream of their own. When they are shown depends on the clock, and the
        # release must not depend on it.
        return self._sample_each_class(
            self.trainer.ema_net, images_per_class, self.streams.make_rng("shown", self.device)
        )

    def export_artifact(self) -> Artifact:
        """Export the generator with averaged weights."""
        images_per_class = -(-NORM_CALIBRATION_IMAGES // self.spec.num_classes)
        rng = self.streams.make_rng("settling", self.device)
        net = self.trainer.recalibrate(
            lambda ema_net: self._sample_each_class(ema_net, images_per_class, rng)
        )
        return Artifact.from_generator(
            GENERATOR_CLASSES[self.settings.generator], self.generator_config, net
        )

    def _sample_each_class(
        self, net: torch.nn.Module, images_per_class: int, rng: torch.Generator
    ) -> Tensor:
        """Generate images of each class.

        Args:
            net: The generator.
            images_per_class: Images of each class.
            rng: Random generator of the latent vectors.

        Returns:
            Images [classes * images_per_class, channels, height, width].
        """
        labels = torch.arange(self.spec.num_classes, device=self.device).repeat_interleave(
            images_per_class
        )
        latents = torch.randn(
            len(labels), self.settings.latent_dim, generator=rng, device=self.device
        )
        with torch.no_grad():
            return net(latents, labels)
