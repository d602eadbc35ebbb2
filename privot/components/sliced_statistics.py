r"""Moments and sorted blocks of slices: the queries of the sliced methods in mode blocks.

There are two Gaussian queries, which together are one. *moments* returns for each class the sums of
z and z zᵀ. *blocks* returns, for each class and direction theta of a tight frame, the n projections
sorted and summed in m blocks of s = n // m neighbors. Moments give location and spread of a class
with far less noise than slices do; slices give what a Gaussian lacks. Everything else is
post-processing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from privot.components.block_quantiles import compute_normal_block_means, denoise_quantiles
from privot.components.latent_space import LatentSpace
from privot.components.sliced_moments import compute_record_moments, estimate_gaussians
from privot.components.transforms import ImageTransform
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.gate import Gate
from privot.privacy.plan import Stage
from privot.runtime import Progress, Streams
from privot.transport.sliced import random_orthogonal_frames


def encode_point(image: Tensor, label: Tensor, space: ImageTransform | LatentSpace) -> Tensor:
    """Encode a record as a point [dim]. The gate clips it to the radius.

    Args:
        image: One image [channels, height, width].
        label: Its label [], which the gate uses to sort by class.
        space: The space of the points.

    Returns:
        The point [dim].
    """
    return space.encode_image(image)


@dataclass(frozen=True, kw_only=True)
class SlicedStatistics:
    """Denoised statistics of each class.

    Attributes:
        means: Means of the initial Gaussians [classes, dim].
        covariance_roots: Roots of their covariances [classes, dim, dim].
        frame: Orthonormal bases [num_bases, dim, dim].
        targets: Ascending quantiles along the bases [classes, num_bases, dim, num_blocks].
    """

    means: Tensor
    covariance_roots: Tensor
    frame: Tensor
    targets: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the statistics by name, for a release."""
        return asdict(self)

    def sample_points(self, points_per_class: int, rng: torch.Generator) -> Tensor:
        """Sample the initial Gaussians: [classes, points_per_class, dim]."""
        noise = torch.randn(
            len(self.means), points_per_class, self.means.shape[1], generator=rng
        ).to(self.means)
        return self.means[:, None] + noise @ self.covariance_roots.mT


def build_sliced_stages(noise_multiplier: float, moments_share: float) -> tuple[Stage, Stage]:
    """Build both stages, which together cost one Gaussian query of the given noise multiplier.

    Args:
        noise_multiplier: Noise multiplier of that one query.
        moments_share: Share of mu² for the moments; the rest is for the blocks.

    Returns:
        The stages "moments" and "blocks".
    """
    return (
        Stage("moments", "sum", noise_multiplier / math.sqrt(moments_share)),
        Stage("blocks", "sorted_blocks", noise_multiplier / math.sqrt(1 - moments_share)),
    )


def require_class_sizes(spec: Spec, num_blocks: int) -> tuple[int, ...]:
    """Return the declared class sizes.

    Raises:
        SettingError: They are not declared, or a class has fewer records than there are blocks.
    """
    if spec.class_sizes is None:
        raise SettingError(
            "mode=blocks needs the number of records of each class, declared as public. Declare it "
            "by --public-classes, by --class-sizes 100,120,... for privot plan, or by "
            "Spec(..., class_sizes=...); or use mode=records, which needs only the data set's size."
        )
    if min(spec.class_sizes) < num_blocks:
        raise SettingError(
            f"num_blocks={num_blocks} is more than the {min(spec.class_sizes)} records of the "
            f"smallest class. Set num_blocks to {min(spec.class_sizes)} or less."
        )
    return spec.class_sizes


def query_sliced_statistics(
    gate: Gate,
    space: ImageTransform | LatentSpace,
    *,
    num_bases: int,
    patch_size: int,
    num_blocks: int,
    radius: float,
    streams: Streams,
    progress: Progress,
) -> SlicedStatistics:
    """Query moments and sorted blocks, and denoise the results.

    Args:
        gate: The gate in front of the records, with stages "moments" and "blocks".
        space: The space of the points.
        num_bases: Number of orthonormal bases of the frame.
        patch_size: Pixels a side of the cells of local bases; 0: there are none.
        num_blocks: Number of blocks of order statistics.
        radius: Radius of the ball of the points.
        streams: Public random streams.
        progress: Shows the progress.

    Returns:
        The denoised statistics.
    """
    device = streams.runtime.torch_device
    channels = gate.spec.shape[0]
    sizes = require_class_sizes(gate.spec, num_blocks)
    dim = space.dim(channels)
    class_sizes = torch.tensor(sizes, device=device)
    # The dimensions of a latent vector are no pixels, so they have no neighbors.
    patch_size = patch_size if isinstance(space, ImageTransform) else 0
    frame = draw_tight_frame(space, channels, num_bases, patch_size, streams.make_rng("frame"))
    noise = {stage.name: 2 * stage.noise_multiplier for stage in gate.plan.stages}
    space = space.to(device)
    progress("querying moments", 0, 2)
    moment_sums = gate.sum(
        "moments", compute_record_moments, space, radius, clip_norm=1.0, per_class=True
    )
    means, covariances = estimate_gaussians(
        moment_sums / class_sizes[:, None], noise["moments"] / class_sizes, radius
    )
    progress("querying sorted blocks", 1, 2)
    block_means = gate.sorted_blocks(
        "blocks",
        encode_point,
        space,
        frame=frame.flatten(0, 1),
        num_blocks=num_blocks,
        clip_norm=radius,
    )
    progress("querying sorted blocks", 2, 2)
    block_means = block_means.double().unflatten(1, (num_bases, dim))
    expected = _project_gaussians(means, covariances, frame.to(device), num_blocks)
    noise_std = noise["blocks"] * radius * math.sqrt(num_bases) / (class_sizes // num_blocks)
    targets = _denoise_targets(block_means, expected, noise_std, num_kinds=1 + bool(patch_size))
    values, vectors = torch.linalg.eigh(covariances)
    covariance_roots = vectors * values.clamp(min=0).sqrt()[:, None]
    return SlicedStatistics(
        means=means.float(),
        covariance_roots=covariance_roots.float(),
        frame=frame.float().to(device),
        targets=targets.float(),
    )


def _denoise_targets(
    block_means: Tensor, expected: Tensor, noise_std: Tensor, num_kinds: int
) -> Tensor:
    """Denoise the block means of each kind of bases separately.

    Local and global bases have quantile functions of different energies.

    Args:
        block_means: Noisy block means [classes, num_bases, dim, num_blocks].
        expected: Block means of Gaussians [classes, num_bases, dim, num_blocks].
        noise_std: Standard deviation of the noise of each class [classes].
        num_kinds: Number of kinds of bases, which take turns.

    Returns:
        Ascending quantiles [classes, num_bases, dim, num_blocks].
    """
    num_bases, dim = block_means.shape[1:3]
    targets = torch.empty_like(block_means)
    for kind in range(min(num_kinds, num_bases)):
        selected = slice(kind, None, num_kinds)
        denoised = denoise_quantiles(
            block_means[:, selected].flatten(1, 2), expected[:, selected].flatten(1, 2), noise_std
        )
        targets[:, selected] = denoised.unflatten(1, (-1, dim))
    return targets


def _project_gaussians(
    means: Tensor, covariances: Tensor, frame: Tensor, num_blocks: int
) -> Tensor:
    """Compute the block means of Gaussians along a frame.

    Args:
        means: Means [classes, dim].
        covariances: Covariances [classes, dim, dim].
        frame: Orthonormal bases [num_bases, dim, dim].
        num_blocks: Number of blocks.

    Returns:
        Block means [classes, num_bases, dim, num_blocks].
    """
    variances = torch.einsum("bkd,cde,bke->cbk", frame, covariances, frame)
    stds = variances.clamp(min=0).sqrt()
    normal_blocks = compute_normal_block_means(num_blocks).to(frame.device)
    return torch.einsum("bkd,cd->cbk", frame, means)[..., None] + stds[..., None] * normal_blocks


def draw_tight_frame(
    space: ImageTransform | LatentSpace,
    channels: int,
    num_bases: int,
    patch_size: int,
    rng: torch.Generator,
) -> Tensor:
    r"""Draw random orthonormal bases of the space, in float64.

    If `patch_size` is above 0, every second basis is local: the point is shown as a thumbnail, the
    thumbnail is cut into cells at a random offset (as on a torus), and each cell gets its own
    random basis. Projections of few pixels are far from Gaussian, so they carry more information
    than random directions of the whole space. The frame stays tight,
    :math:`\Theta^T\Theta = num\_bases \cdot I`.

    Args:
        space: The space of the points.
        channels: Channels of an image.
        num_bases: Number of bases.
        patch_size: Pixels a side of a cell; 0: all bases are global.
        rng: Random generator on the CPU.

    Returns:
        The bases [num_bases, dim, dim].
    """
    dim = space.dim(channels)
    frame = random_orthogonal_frames(dim, num_bases, rng).view(num_bases, dim, dim)
    if not patch_size or isinstance(space, LatentSpace):
        return frame
    height, width = space.weights.shape
    pixel_index = torch.arange(dim).view(channels, height, width)
    # The frame is computed on the CPU, on whatever device the points are. The singular value
    # decomposition makes the basis orthonormal to the last digit.
    left, _, right = torch.linalg.svd(space.build_thumbnail_basis().double().cpu())
    thumbnail_basis = torch.block_diag(*[left @ right] * channels)
    for basis_index in range(1, num_bases, 2):
        shift = torch.randint(max(height, width), (2,), generator=rng).tolist()
        shifted_index = pixel_index.roll(shift, (1, 2))
        basis = torch.zeros(dim, dim, dtype=torch.float64)
        for top in range(0, height, patch_size):
            for left_edge in range(0, width, patch_size):
                cell = shifted_index[
                    :, top : top + patch_size, left_edge : left_edge + patch_size
                ].flatten()
                basis[cell[:, None], cell] = random_orthogonal_frames(len(cell), 1, rng)
        frame[basis_index] = basis @ thumbnail_basis
    return frame
