"""Sliced flows of particles to target quantiles: of each class, of noisy points, and of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privot.components.flow_snapshots import FlowSnapshots
from privot.components.latent_space import LatentSpace
from privot.components.noisy_projections import (
    NoisyProjections,
    compute_block_quantiles,
    encode_record,
)
from privot.components.sliced_statistics import SlicedStatistics
from privot.components.transforms import ImageTransform
from privot.privacy.gate import Gate
from privot.runtime import Progress, Streams
from privot.transport.sliced import (
    displace_points,
    random_orthogonal_frames,
    slice_targets,
    sliced_flow_step,
)

FINAL_STEP_SIZE = 0.02  # step size at the end of a flow


def run_sliced_flow(
    points: Tensor,
    statistics: SlicedStatistics,
    *,
    steps: int,
    step_size: float,
    diffusion: float,
    snapshots: FlowSnapshots,
    streams: Streams,
    progress: Progress,
) -> Tensor:
    """Move particles until their quantiles along all bases are the targets, one basis a step.

    Args:
        points: Particles [classes, n, dim].
        statistics: The frame and the target quantiles.
        steps: Number of steps.
        step_size: Initial step size, see `build_flow_schedule`.
        diffusion: Factor of the noise of the paper's SDE, of variance 2 * step size * diffusion in
            each step. It is no part of the privacy guarantee.
        snapshots: Records one particle of each class.
        streams: Public random streams.
        progress: Shows the progress.

    Returns:
        The moved particles [classes, n, dim].
    """
    rng = streams.make_rng("wiener", points.device)
    snapshots.record(0, points[:, 0])
    schedule = build_flow_schedule(len(statistics.frame), steps, step_size, streams)
    for step, (basis, current_step_size) in enumerate(schedule):
        points = sliced_flow_step(
            points, statistics.frame[basis], statistics.targets[:, basis], current_step_size
        )
        if diffusion:
            noise = torch.randn(points.shape, generator=rng, device=points.device)
            points = points + math.sqrt(2 * current_step_size * diffusion) * noise
        snapshots.record(step + 1, points[:, 0])
        if step % 10 == 9 or step + 1 == steps:
            progress("moving the particles", step + 1, steps)
    return points


def build_flow_schedule(
    num_bases: int, steps: int, step_size: float, streams: Streams
) -> list[tuple[int, float]]:
    """Choose the basis and the step size of each step.

    The step size is constant for a third of the steps and then falls, so that the disagreement of
    the bases averages out.

    Args:
        num_bases: Number of bases; each is used equally often, in random order.
        steps: Number of steps.
        step_size: Initial step size.
        streams: Public random streams.

    Returns:
        Index of the basis and step size, for each step.
    """
    order = draw_basis_order(num_bases, steps, streams)
    constant_steps = steps // 3
    return [
        (
            basis,
            step_size
            if step < constant_steps
            else FINAL_STEP_SIZE
            + max(step_size - FINAL_STEP_SIZE, 0)
            * (1 - (step - constant_steps) / (steps - constant_steps)) ** 2,
        )
        for step, basis in enumerate(order)
    ]


def draw_basis_order(num_bases: int, steps: int, streams: Streams) -> list[int]:
    """Draw the basis of each step, by one random permutation of all bases after another.

    Args:
        num_bases: Number of bases.
        steps: Number of steps.
        streams: Public random streams.

    Returns:
        Indices of bases [steps].
    """
    rng = streams.make_rng("turns")
    permutations = [torch.randperm(num_bases, generator=rng) for _ in range(-(-steps // num_bases))]
    order: list[int] = torch.cat(permutations).tolist()
    return order[:steps]


# Flows of modes records and resampled. Here a point is followed by its label vector.


@dataclass(frozen=True)
class ParticleFlow:
    """Settings and surroundings of a flow in the modes records and resampled.

    Attributes:
        dim: Dimension of a point without its label vector.
        particles_per_class: Particles of each class.
        steps: Number of steps.
        step_size: Initial step size.
        diffusion: Factor of the noise of the paper's SDE.
        snapshots: Records one particle of each class.
        streams: Public random streams and checkpoints.
        progress: Shows the progress.
    """

    dim: int
    particles_per_class: int
    steps: int
    step_size: float
    diffusion: float
    snapshots: FlowSnapshots
    streams: Streams
    progress: Progress

    def record_snapshot(self, step: int, points: Tensor) -> None:
        """Record one particle of each class, without its label vector."""
        self.snapshots.record(step, points[:: self.particles_per_class, : self.dim])

    def report_step(self, step: int, points: Tensor) -> None:
        """Record a snapshot, and show the progress from time to time, after a step."""
        self.record_snapshot(step + 1, points)
        if step % 10 == 9 or step + 1 == self.steps:
            self.progress("moving the particles", step + 1, self.steps)

    def diffuse(
        self, points: Tensor, previous_points: Tensor, step_size: float, rng: torch.Generator
    ) -> Tensor:
        """Add the noise of the SDE to points and restore their label vectors.

        Args:
            points: Moved particles [count, dim (+ classes)].
            previous_points: The particles before the step, with their label vectors.
            step_size: Step size of the step.
            rng: Random generator of the noise.

        Returns:
            The particles after the step.
        """
        if self.diffusion:
            noise = torch.randn(points.shape, generator=rng, device=points.device)
            points = points + math.sqrt(2 * step_size * self.diffusion) * noise
        return torch.cat([points[:, : self.dim], previous_points[:, self.dim :]], 1)


def flow_to_records(flow: ParticleFlow, points: Tensor, projections: NoisyProjections) -> Tensor:
    """Move particles to the quantiles of the records' noisy points (DPSWflow).

    In each step the particles get as much noise as the records have, so that both clouds are
    smoothed alike.

    Args:
        flow: Settings of the flow.
        points: Particles with label vectors [count, dim (+ classes)].
        projections: The frame and the quantiles.

    Returns:
        The moved particles.
    """
    rng = flow.streams.make_rng("smoothing", points.device)
    flow.record_snapshot(0, points)
    schedule = build_flow_schedule(len(projections.frame), flow.steps, flow.step_size, flow.streams)
    for step, (basis, step_size) in enumerate(schedule):
        frame = projections.frame[basis]
        smoothed = frame @ projections.add_matching_noise(points, rng).mT
        displacements = slice_targets(smoothed, projections.targets[basis]).sub_(smoothed)
        moved = displace_points(points, displacements, frame, step_size)
        points = flow.diffuse(moved, points, step_size, rng)
        flow.report_step(step, points)
    return points


def compute_quantile_gaps(
    records: Any,
    space: ImageTransform | LatentSpace,
    radius: float,
    label_norm: float,
    classes: int,
    frame: Tensor,
    particle_quantiles: Tensor,
) -> Tensor:
    """Compute the quantiles of a sample of records along a frame, less those of the particles.

    Args:
        records: The sample, with images and labels.
        space: The space of the points.
        radius: Radius of the ball of the points.
        label_norm: Length of a label vector; 0 leaves labels out.
        classes: Number of classes.
        frame: Directions [slices, dim (+ classes)].
        particle_quantiles: Quantiles of the particles [slices, num_blocks].

    Returns:
        The gaps [slices, num_blocks].
    """
    encode_records = torch.func.vmap(encode_record, in_dims=(0, 0, None, None, None, None))
    points = encode_records(records.images, records.labels, space, radius, label_norm, classes)
    return (
        compute_block_quantiles(points @ frame.T, particle_quantiles.shape[1]) - particle_quantiles
    )


def flow_to_samples(
    flow: ParticleFlow,
    points: Tensor,
    gate: Gate,
    space: ImageTransform | LatentSpace,
    *,
    radius: float,
    label_norm: float,
    num_blocks: int,
    clip_norm: float,
) -> Tensor:
    """Move particles by noisy quantile gaps of a fresh sample and a fresh basis (DPSWflow-r).

    Args:
        flow: Settings of the flow.
        points: Particles with label vectors [count, dim (+ classes)].
        gate: The gate in front of the records, with a stage "quantile_gaps".
        space: The space of the points.
        radius: Radius of the ball of the points.
        label_norm: Length of a label vector; 0 leaves labels out.
        num_blocks: Number of blocks of order statistics.
        clip_norm: Largest norm of a query result.

    Returns:
        The moved particles.
    """
    device = points.device
    # Queries that were made before a crash are lost.
    first_step = flow.steps - gate.count_remaining_queries("quantile_gaps")
    checkpoint = flow.streams.load_checkpoint("particles") if first_step else None
    if checkpoint is not None:
        points = checkpoint["points"]
    flow.record_snapshot(first_step, points)
    for step in range(first_step, flow.steps):
        # Each step has its own stream, so that a resumed run draws the same numbers.
        rng = flow.streams.make_rng(f"step {step}")
        frame = random_orthogonal_frames(points.shape[1], 1, rng).float().to(device)
        projections = frame @ points.mT
        particle_quantiles = compute_block_quantiles(projections.mT, num_blocks)
        noisy_gaps = gate.query_sample(
            "quantile_gaps",
            compute_quantile_gaps,
            space,
            radius,
            label_norm,
            gate.spec.num_classes,
            frame,
            particle_quantiles,
            clip_norm=clip_norm,
            shape=tuple(particle_quantiles.shape),
        ).float()
        step_size = flow.step_size * (1 - step / flow.steps)
        moved = displace_points(points, slice_targets(projections, noisy_gaps), frame, step_size)
        noise_rng = flow.streams.make_rng(f"wiener {step}", device)
        points = flow.diffuse(moved, points, step_size, noise_rng)
        if flow.streams.is_checkpoint_due(step, flow.steps):
            flow.streams.save_checkpoint("particles", {"points": points})
        flow.report_step(step, points)
    return points
