"""Record the images of a search at given evaluations."""

from __future__ import annotations

import torch
from torch import Tensor

from privot.attacks.inversion.problem import Reconstruction
from privot.attacks.inversion.search import SearchCallback


class TraceRecorder:
    """Images of all victims at given evaluations.

    Args:
        trace_steps: Evaluations at which images are stored.
        callback: Called at every evaluation, or None.
    """

    def __init__(self, trace_steps: tuple[int, ...], callback: SearchCallback | None):
        self.trace_steps = sorted(trace_steps)
        self.callback = callback
        self.snapshots = dict[int, tuple[Tensor, Tensor]]()

    def build_callback(self, step_offset: int, victim_indices: Tensor) -> SearchCallback | None:
        """Build the callback of a phase that starts after ``step_offset`` evaluations.

        None where there is nothing to record.
        """
        if not self.trace_steps and self.callback is None:
            return None

        def _record_step(step: int, indices: Tensor, images: Tensor) -> None:
            if step_offset + step in self.trace_steps:
                self.snapshots[step_offset + step] = (indices, images.clone())
            if self.callback is not None:
                self.callback(step_offset + step, indices, images)

        return _record_step

    def build_trace(self, final_images: Tensor) -> tuple[tuple[int, Tensor], ...]:
        """Return (evaluation, images [N, ...]); a victim that had stopped shows its final image."""
        trace = []
        for step, (indices, images) in sorted(self.snapshots.items()):
            snapshot = final_images.clone()
            snapshot[indices] = images
            trace.append((step, snapshot))
        return tuple(trace)


def remap_callback(callback: SearchCallback | None, indices: Tensor) -> SearchCallback | None:
    """Turn indices within a chunk of victims into indices of all victims before each call."""
    if callback is None:
        return None
    return lambda step, chunk_indices, images: callback(step, indices[chunk_indices], images)


def concatenate_reconstructions(chunks: list[Reconstruction]) -> Reconstruction:
    """Join the reconstructions of several chunks of victims.

    A chunk whose search ended early contributes its final images to later entries of the trace.
    """
    if len(chunks) == 1:
        return chunks[0]
    trace_steps = sorted({step for chunk in chunks if chunk.trace for step, _ in chunk.trace})
    trace = [
        (step, torch.cat([dict(chunk.trace or ()).get(step, chunk.images) for chunk in chunks]))
        for step in trace_steps
    ]
    return Reconstruction(
        torch.cat([chunk.images for chunk in chunks]),
        torch.cat([chunk.labels for chunk in chunks]),
        torch.cat([chunk.steps for chunk in chunks]),
        torch.cat([chunk.residual for chunk in chunks]),
        tuple(trace) if chunks[0].trace is not None else None,
    )
