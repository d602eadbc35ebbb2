"""Distribution matching (DM) of many sets at once, each from its own subset of the same records.

In each step all sets share the random network, the augmentations and the sampled records, and each
set uses those of the sampled records that belong to it. So the records are embedded once for all
sets, and the sets pass through the network as one batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from privot.baselines.augmentation_buffer import AugmentationBuffer
from privot.baselines.condensation import (
    ClassPool,
    PixelOptimizer,
    standardize_images,
    unstandardize_images,
)
from privot.baselines.feature_means import build_random_net, extract_features
from privot.data.spec import Spec
from privot.errors import DataError
from privot.nets.augment import AugmentParams, apply_augmentations
from privot.nets.generators.conv import initialize_weights
from privot.runtime import Progress, Streams
from privot.runtime.cuda_graphs import GraphedStep

NUM_PHASES = 20  # the state of a long run is saved after each phase, so a crash loses a twentieth
STEPS_PER_REPORT = 100


class ParallelDistributionMatching:
    r"""DM of many sets.

    With m the members of set s among the sampled records T_c of a class, each step follows the
    gradient of :math:`\sum_s \sum_c |\mu_{s,c} - \mathrm{mean}\, \psi(A(S_{s,c}))|^2` with
    :math:`\mu_{s,c} = \mathrm{mean}_{T_c \cap m}\, \psi(A(x))`, which for one set is the method's
    own.

    Args:
        pool: All records.
        membership: Which records belong to which set, bool [sets, records].
        initial_images: Images in [0, 1], classes in order [sets, classes * images_per_class, ...].
        spec: Shape and number of classes.
        streams: Public random streams.
        learning_rate: Step size.
        batch_per_class: Records of a class in a step, for each set on average. Sets are expected
            to contain half of the records, so twice as many are sampled.
        augment: Whether images are augmented.
        net_width: Channels of each block of the random networks.
        net_depth: Number of blocks.
    """

    def __init__(
        self,
        pool: ClassPool,
        membership: Tensor,
        initial_images: Tensor,
        spec: Spec,
        streams: Streams,
        *,
        learning_rate: float,
        batch_per_class: int,
        augment: bool,
        net_width: int,
        net_depth: int,
    ):
        device = initial_images.device
        self.streams = streams
        self.chunk_size = streams.runtime.chunk_size
        self.pool = pool
        self.membership = membership
        self.classes = spec.num_classes
        self.records_per_draw = 2 * batch_per_class
        self.num_sets = len(initial_images)
        self.images_per_class = initial_images.shape[1] // spec.num_classes
        _check_membership(pool, membership)
        self.pixels = PixelOptimizer(initial_images.flatten(0, 1), spec, learning_rate)
        self.net = build_random_net(spec, net_width, net_depth, device)
        self.rng = torch.Generator(device)
        self.augmentations = None
        if augment:
            self.augmentations = AugmentationBuffer(
                spec.num_classes, spec, torch.Generator(device), device
            )
        self.class_indices = torch.arange(spec.num_classes, device=device)
        self.graphed_step = GraphedStep(self.step, device, self.rng)

    def run(
        self,
        steps: int,
        progress: Progress,
        initial_state: dict[str, Tensor] | None = None,
        save_state: Callable[[dict[str, Tensor]], None] = lambda state: None,
    ) -> Tensor:
        """Run all steps.

        The random numbers of a phase depend on its index only, so a resumed run gives the same
        result as a run without interruption.

        Args:
            steps: Number of steps.
            progress: Shows the progress.
            initial_state: A saved state to resume from, or None.
            save_state: Called with the state after each phase but the last.

        Returns:
            The sets in [0, 1] [sets, classes * images_per_class, ...].
        """
        first_phase = 0
        if initial_state is not None:
            first_phase = int(initial_state["phase"])
            self.pixels.pixels.data.copy_(initial_state["pixels"])
            self.pixels.momentum_buffer.copy_(initial_state["momentum"])
        for phase in range(first_phase, NUM_PHASES):
            self._seed_phase(phase)
            first_step = steps * phase // NUM_PHASES
            end_step = steps * (phase + 1) // NUM_PHASES
            for step in range(first_step, end_step):
                if self.augmentations:
                    self.augmentations.refill_if_empty()
                self.graphed_step()
                if (step + 1) % STEPS_PER_REPORT == 0 or step + 1 == end_step:
                    progress("matching the means", step + 1, steps)
            if end_step > first_step and phase + 1 < NUM_PHASES:
                save_state(
                    {
                        "phase": torch.tensor(phase + 1),
                        "pixels": self.pixels.pixels.detach(),
                        "momentum": self.pixels.momentum_buffer,
                    }
                )
        return unstandardize_images(self.pixels.pixels).unflatten(0, (self.num_sets, -1))

    def _seed_phase(self, phase: int) -> None:
        self.rng.manual_seed(self.streams.make_rng(f"draws {phase}").initial_seed())
        if self.augmentations:
            self.augmentations.rng.manual_seed(
                self.streams.make_rng(f"augment {phase}").initial_seed()
            )
            self.augmentations.discard()  # the buffer belongs to the phase before

    def step(self) -> None:
        """Sample a new network and records, and make one gradient step of every set."""
        initialize_weights(self.net, self.rng)
        real, weights = self.sample_records()
        params = self.augmentations.next_params() if self.augmentations else None
        if params:
            labels = self.class_indices.repeat_interleave(weights.shape[2])
            real = apply_augmentations(real, params.select(labels))
        targets = self.compute_targets(real, weights)
        # [classes, sets]; a set without a member among the sampled records of a class has nothing
        # to match there
        has_members = weights.sum(2) > 0
        set_size = self.classes * self.images_per_class
        sets_per_chunk = max(1, self.chunk_size // set_size)
        gradients: list[Tensor] = []
        for first_set in range(0, self.num_sets, sets_per_chunk):
            chunk = slice(first_set, first_set + sets_per_chunk)
            pixels = self.pixels.pixels.detach()[
                first_set * set_size : (first_set + sets_per_chunk) * set_size
            ].requires_grad_()
            images = self._augment_sets(pixels, params) if params else pixels
            distances = self.compute_distances(images, targets[:, chunk], has_members[:, chunk])
            gradients += torch.autograd.grad(distances.sum(), pixels)
        self.pixels.apply_gradient(torch.cat(gradients))

    def _augment_sets(self, pixels: Tensor, params: AugmentParams) -> Tensor:
        """Augment the pixels of some sets; all images of a class share their parameters."""
        set_labels = self.class_indices.repeat_interleave(self.images_per_class)
        labels = set_labels.repeat(len(pixels) // len(set_labels))
        return apply_augmentations(pixels, params.select(labels))

    def sample_records(self) -> tuple[Tensor, Tensor]:
        """Sample records of each class, shared by all sets.

        Returns:
            Standardized records [classes * sampled, ...], and for each set the weights of its
            members among them [classes, sets, sampled].
        """
        is_record = self.pool.is_record
        keys = torch.rand(is_record.shape, generator=self.rng, device=is_record.device).masked_fill(
            ~is_record, -1
        )
        columns = keys.topk(min(self.records_per_draw, keys.shape[1]), sorted=False).indices
        indices = self.pool.record_indices.gather(1, columns)  # [classes, sampled]
        is_member = self.membership[:, indices] & is_record.gather(1, columns)
        weights = is_member.transpose(0, 1).float()
        records = standardize_images(self.pool.images[indices.flatten()])
        return records, weights / weights.sum(2, keepdim=True).clamp(min=1)

    def compute_targets(self, real: Tensor, weights: Tensor) -> Tensor:
        """Compute the class means of every set's members.

        Args:
            real: Standardized records [classes * sampled, ...].
            weights: Their weights [classes, sets, sampled].

        Returns:
            Means [classes, sets, features].
        """
        with torch.no_grad():
            features = extract_features(self.net, real, self.chunk_size)
            return weights @ features.view(self.classes, weights.shape[2], -1)

    def compute_distances(self, images: Tensor, targets: Tensor, has_members: Tensor) -> Tensor:
        """Compute squared distances of the class means.

        Args:
            images: Standardized images of some sets [sets * classes * images_per_class, ...].
            targets: Means of the members [classes, sets, features].
            has_members: Which sets have a member in the step [classes, sets].

        Returns:
            Distances [classes, sets], 0 where a set has no member.
        """
        features = extract_features(self.net, images, len(images)).view(
            -1, self.classes, self.images_per_class, targets.shape[2]
        )
        return (targets - features.mean(2).transpose(0, 1)).square().sum(2) * has_members


def _check_membership(pool: ClassPool, membership: Tensor) -> None:
    """Raise an error unless every set has a member of every class."""
    rows = zip(pool.record_indices, pool.is_record, strict=True)
    for label, (indices, is_record) in enumerate(rows):
        if not (membership[:, indices] & is_record).any(1).all():
            raise DataError(
                f"class {label} has no member in one of the sets. Use fewer classes or more "
                "records."
            )
