"""Many small ConvNets behind one interface, with images that are shared or one set for each net.

The nets run one after another with dense convolutions. On a GPU, where their steps are captured as
one CUDA graph, that is as fast as grouped convolutions. On a CPU it is twice as fast. Memory holds
the maps of one net, whatever the number of nets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from privot.nets.conv_block import apply_conv_block, choose_compute_dtype
from privot.nets.conv_shapes import ConvNetShapes


class Ensemble(nn.Module):
    """Several ConvNets with their own weights: the same blocks and initialization as `ConvNet`.

    Images are [count, channels, height, width] for all nets, or [nets, count, ...] with a set for
    each net. The results of a net do not depend on the other nets, so each trains as it would
    alone.

    Args:
        num_nets: Number of networks.
        shape: Channels, height and width of the images.
        classes: Number of classes.
        width: Channels of every block.
        depth: Number of blocks.
        texture_norm: Norm of each texture in `extract_features`; 0 leaves textures out.
        generator: Source of the random weights.

    >>> rng = torch.Generator().manual_seed(0)
    >>> nets = Ensemble(4, (1, 28, 28), 10, width=8, generator=rng)
    >>> nets.features(torch.zeros(2, 1, 28, 28)).shape, nets(torch.zeros(4, 2, 1, 28, 28)).shape
    (torch.Size([4, 2, 128]), torch.Size([4, 2, 10]))
    """

    def __init__(
        self,
        num_nets: int,
        shape: tuple[int, int, int],
        classes: int,
        width: int = 128,
        depth: int = 3,
        *,
        texture_norm: float = 0.0,
        generator: torch.Generator,
    ):
        super().__init__()
        self.shapes = ConvNetShapes(shape, width, depth)
        self.num_nets = num_nets
        self.classes = classes
        self.num_blocks = self.shapes.num_blocks
        self.num_features = self.shapes.num_features
        self.texture_norm = texture_norm
        for block in range(self.num_blocks):
            conv_shape = self.shapes.parameter_shapes[f"conv{block}"]
            limit = 1 / math.sqrt(conv_shape[1] * 9)
            self._register_uniform(f"conv{block}", conv_shape, limit, generator)
            self._register_uniform(f"bias{block}", (width,), limit, generator)
            self.register_parameter(f"gain{block}", nn.Parameter(torch.ones(num_nets, width)))
            self.register_parameter(f"shift{block}", nn.Parameter(torch.zeros(num_nets, width)))
        limit = 1 / math.sqrt(self.num_features)
        self._register_uniform("head_weight", (self.num_features, classes), limit, generator)
        self._register_uniform("head_bias", (1, classes), limit, generator)

    def _register_uniform(
        self, name: str, shape: tuple[int, ...], limit: float, generator: torch.Generator
    ) -> None:
        """Register a parameter [nets, *shape], uniform in [-limit, limit].

        Args:
            name: Name of the parameter.
            shape: Its shape for one net.
            limit: Largest absolute value.
            generator: Source of the random numbers.
        """
        uniform = torch.rand((self.num_nets, *shape), generator=generator)
        self.register_parameter(name, nn.Parameter((2 * uniform - 1) * limit))

    def select(self, index: Tensor) -> dict[str, Tensor]:
        """Return the parameters of the nets at these indices, for `features` and `forward`."""
        return {name: value[index] for name, value in self.named_parameters()}

    def copy_blocks_from(self, source: Ensemble) -> None:
        """Copy the blocks of the nets of `source` in turn. The last layers stay as they are."""
        indices = [index % source.num_nets for index in range(self.num_nets)]
        with torch.no_grad():
            for name, value in self.named_parameters():
                if name not in ("head_weight", "head_bias"):
                    value.copy_(source.get_parameter(name)[indices])

    def features(self, images: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return the inputs of the last layer.

        Args:
            images: Images, shared or one set for each net.
            weights: Parameters of some of the nets, or None for all.

        Returns:
            Features, [nets, count, num_features].
        """
        weights = weights or dict(self.named_parameters())
        return self._compute_block_maps(images, weights, slice(-1, None))[0].flatten(2)

    @property
    def num_extracted_features(self) -> int:
        """Number of features that `extract_features` returns."""
        num_blocks, channels = self.shapes.texture_layout
        num_textures = num_blocks * channels * (channels + 1) // 2 if self.texture_norm else 0
        return self.num_features + num_textures

    def extract_features(self, images: Tensor, weights: dict[str, Tensor]) -> Tensor:
        r"""Return the features and, with a `texture_norm`, the textures of images.

        A texture is :math:`\sum_p h_i(p) h_j(p)` over the positions of a map, for pairs i <= j of
        its first channels: which patterns occur together, wherever they lie (Gatys et al. 2015).
        With textures, the features have norm 1 and each map's texture has norm `texture_norm`.

        Args:
            images: Images, shared or one set for each net.
            weights: Parameters of some of the nets.

        Returns:
            Features and textures in float32, [nets, count, num_extracted_features].
        """
        if not self.texture_norm:
            return self.features(images, weights).float()
        num_blocks, channels = self.shapes.texture_layout
        last_blocks = slice(-max(num_blocks, 1), None)
        maps = [level.float() for level in self._compute_block_maps(images, weights, last_blocks)]
        first, second = torch.triu_indices(channels, channels, device=images.device)
        features = [_normalize_rows(maps[-1].flatten(2))]
        for level in maps[len(maps) - num_blocks :]:
            channel_maps = level[:, :, :channels].flatten(3)
            products = (channel_maps @ channel_maps.mT)[..., first, second]
            features.append(self.texture_norm * _normalize_rows(products))
        return torch.cat(features, 2)

    def pool_block_features(
        self, images: Tensor, weights: dict[str, Tensor] | None = None, *, max_side: int
    ) -> list[Tensor]:
        """Average the maps after each block to at most `max_side` x `max_side` positions.

        Args:
            images: Images, shared or one set for each net.
            weights: Parameters of some of the nets, or None for all.
            max_side: Largest side of the averaged maps.

        Returns:
            For each block, features [nets, count, channels * positions].
        """
        weights = weights or dict(self.named_parameters())
        pooled = []
        for maps in self._compute_block_maps(images, weights, slice(None)):
            sides = (min(max_side, maps.shape[-2]), min(max_side, maps.shape[-1]))
            averages = adaptive_avg_pool2d(maps.flatten(0, 1), sides)
            pooled.append(averages.flatten(1).unflatten(0, maps.shape[:2]))
        return pooled

    def _compute_block_maps(
        self, images: Tensor, weights: dict[str, Tensor], blocks: slice
    ) -> list[Tensor]:
        """Compute the maps after some of the blocks.

        Args:
            images: Images, shared or one set for each net.
            weights: Parameters of some of the nets.
            blocks: Which blocks.

        Returns:
            For each block, maps [nets, count, channels, height, width]. A network without blocks
            has one level, its images.
        """
        # One unbind of each parameter: its gradient is one stack. The gradient of each slice would
        # be a whole tensor.
        unbound = zip(*(value.unbind() for value in weights.values()), strict=True)
        weights_per_net = (dict(zip(weights, values, strict=True)) for values in unbound)
        num_nets = len(weights["head_bias"])
        images_per_net = images.unbind() if images.ndim == 5 else [images] * num_nets
        maps_per_net = [
            self._forward_blocks(own_images, own_weights)[blocks]
            for own_images, own_weights in zip(images_per_net, weights_per_net, strict=True)
        ]
        return [torch.stack(level) for level in zip(*maps_per_net, strict=True)]

    def _forward_blocks(self, x: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
        """Return the maps after each block of one net, [count, width, height, width]."""
        levels = [] if self.num_blocks else [x]
        for block in range(self.num_blocks):
            x = apply_conv_block(
                x,
                weights[f"conv{block}"],
                weights[f"bias{block}"],
                weights[f"gain{block}"],
                weights[f"shift{block}"],
                self.shapes.padding if block == 0 else 1,
            )
            levels.append(x)
        return levels

    def forward(self, images: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return logits [nets, count, classes] of all nets, or of those with these weights."""
        weights = weights or dict(self.named_parameters())
        return self.features(images, weights) @ weights["head_weight"] + weights["head_bias"]


def _normalize_rows(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-6)


class FrozenEnsemble:
    """The weights of an ensemble that no longer changes, in the layout that is fastest.

    On a GPU that is half precision with channels last. An index, which may be a tensor on the
    device, gives the weights of some of the nets, for `Ensemble.features`.
    """

    def __init__(self, ensemble: Ensemble):
        self._weights = {name: value.detach() for name, value in ensemble.named_parameters()}
        dtype = choose_compute_dtype(ensemble.get_parameter("head_bias").device)
        for name, value in self._weights.items():
            if name.startswith("conv"):
                self._weights[name] = value.to(dtype).permute(0, 1, 3, 4, 2).contiguous()

    def __getitem__(self, index: Tensor | slice) -> dict[str, Tensor]:
        return {
            name: value[index].permute(0, 1, 4, 2, 3) if value.ndim == 5 else value[index]
            for name, value in self._weights.items()
        }
