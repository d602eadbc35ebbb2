"""Reconstruct the input of a convolution by least squares, for R-GAP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input

from privot.attacks.inversion.layer_chain import ChainLayer

# Singular values down to 1e-6 of the largest are resolved after this number of corrections.
DAMPING = 1e-11
REFINEMENT_STEPS = 8


def compute_output_size(layer: ChainLayer) -> list[int]:
    """Compute height and width of a convolution's output."""
    module: Any = layer.module
    axes = zip(
        layer.input_shape[1:],
        module.padding,
        module.dilation,
        module.kernel_size,
        module.stride,
        strict=True,
    )
    return [
        (size + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1
        for size, padding, dilation, kernel_size, stride in axes
    ]


def backpropagate_conv(layer: ChainLayer, weight: Tensor, output_gradient: Tensor) -> Tensor:
    """Compute the input gradient of a convolution for each victim.

    Args:
        layer: The convolution.
        weight: [N, o, c, k, k].
        output_gradient: dL/dz [N, o, p, q].

    Returns:
        dL/dx [N, c, h, w].
    """
    module: Any = layer.module
    return torch.stack(
        [
            conv2d_input(
                (1, *layer.input_shape),
                victim_weight,
                victim_gradient[None],
                module.stride,
                module.padding,
                module.dilation,
            )[0]
            for victim_weight, victim_gradient in zip(weight, output_gradient, strict=True)
        ]
    )


def solve_conv_input(
    layer: ChainLayer,
    weight: Tensor,
    weight_gradient: Tensor,
    pre_activation: Tensor,
    output_gradient: Tensor,
    equation_weights: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Solve for the input of one victim's convolution by least squares.

    The equations are conv(x, W) = z and dL/dW = dL/dz * x, brought to one scale. The second is the
    same system D [o k k, h w] for each channel, so the normal matrix is M^T M + I_c (x) D^T D with
    the convolution's matrix M, of which only products are computed.

    Args:
        layer: The convolution.
        weight: W [o, c, k, k].
        weight_gradient: dL/dW [o, c, k, k].
        pre_activation: z without the bias [o, p, q].
        output_gradient: dL/dz [o, p, q].
        equation_weights: Weight of each equation for z [o, p, q].

    Returns:
        x [c, h, w], and the share of the equations that is not satisfied, a scalar.
    """
    module: Any = layer.module
    channels, *sides = layer.input_shape
    num_positions = sides[0] * sides[1]
    conv_args: Any = (module.stride, module.padding, module.dilation)
    unit_images = torch.eye(num_positions, dtype=weight.dtype, device=weight.device)
    patches = functional.unfold(
        unit_images.view(num_positions, 1, *sides),
        module.kernel_size,
        module.dilation,
        module.padding,
        module.stride,
    )  # [h w, k k, p q]
    gradient_system = torch.einsum("op,qkp->okq", output_gradient.flatten(1), patches).flatten(0, 1)
    gradient_target = weight_gradient.permute(0, 2, 3, 1).reshape(-1, channels)  # [o k k, c]

    def apply_normal_matrix(x: Tensor) -> Tensor:  # M^T M x
        output = functional.conv2d(x, weight, None, *conv_args) * equation_weights
        return conv2d_input(x.shape, weight, output, *conv_args)

    def compute_residuals(x: Tensor) -> tuple[Tensor, Tensor]:
        output_residual = pre_activation - functional.conv2d(x[None], weight, None, *conv_args)[0]
        gradient_residual = gradient_target - gradient_system @ x.flatten(1).T
        return output_residual * equation_weights, gradient_residual

    all_units = torch.eye(channels * num_positions, dtype=weight.dtype, device=weight.device)
    normal_matrix = apply_normal_matrix(all_units.view(-1, *layer.input_shape)).flatten(1)
    scale = normal_matrix.diagonal().mean() / gradient_system.square().sum(0).mean()
    channel_block = gradient_system.T @ gradient_system * scale  # [h w, h w]
    normal_matrix.view(channels, num_positions, channels, num_positions).diagonal(
        dim1=0, dim2=2
    ).add_(channel_block[..., None])
    damping = DAMPING * normal_matrix.diagonal().max()
    factor, _ = torch.linalg.cholesky_ex(
        normal_matrix.diagonal_scatter(normal_matrix.diagonal() + damping)
    )
    x = torch.zeros(layer.input_shape, dtype=weight.dtype, device=weight.device)
    # The residuals are those of the equations, so rounding of the normal matrix is corrected.
    for _ in range(REFINEMENT_STEPS):
        output_residual, gradient_residual = compute_residuals(x)
        right_side = conv2d_input(
            (1, *layer.input_shape), weight, output_residual[None], *conv_args
        )[0] + (gradient_system.T @ gradient_residual * scale).T.reshape(layer.input_shape)
        correction = torch.cholesky_solve(right_side.reshape(-1, 1), factor)
        x = x + correction.view(layer.input_shape)
    output_residual, gradient_residual = compute_residuals(x)
    output_share = (
        output_residual.square().sum() / (pre_activation * equation_weights).square().sum()
    )
    return x, output_share + gradient_residual.square().sum() / gradient_target.square().sum()
