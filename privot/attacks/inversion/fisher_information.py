"""The Fisher information H = J^T J of an update about the images behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap

from privot.attacks.inversion.conv_as_matmul import ConvAsMatmul
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.problem_checks import TensorDict
from privot.errors import SettingError

CPU_CHUNK_SIZE = 128
GPU_CHUNK_SIZE = 4096


def compute_fisher_information(
    problem: Problem,
    images: Tensor,
    labels: Tensor,
    defense: Any = None,
    *,
    relative_noise_std: TensorDict | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """Compute H = J^T J in float64, with J = d(update)/d(image).

    Args:
        problem: Model, weights and shapes.
        images: Where J is computed [N, batch, c, h, w].
        labels: [N, batch].
        defense: What the clients do before they send, without its noise.
        relative_noise_std: {name: [N]}, in units of which each tensor of the update is measured.
        chunk_size: Products J^T J v at a time. 0: chosen by the device.

    Returns:
        H [N, n, n] with n = batch * c * h * w.
    """
    exact = problem.to_float64()
    images = images.double()
    num_pixels = images[0].numel()
    chunk_size = chunk_size or (GPU_CHUNK_SIZE if images.is_cuda else CPU_CHUNK_SIZE)
    unit_vectors = torch.eye(num_pixels, dtype=images.dtype, device=images.device)
    scale = relative_noise_std or {
        name: images.new_ones(problem.num_victims) for name in problem.update
    }

    def multiply_tangents(
        weights: TensorDict,
        image: Tensor,
        label: Tensor,
        relative_noise_std: TensorDict,
        tangents: Tensor,
    ) -> Tensor:
        """Compute J^T J v of one victim for several tangents v.

        Args:
            weights: Weights of the model.
            image: The victim's image.
            label: Its label.
            relative_noise_std: Standard deviation of the noise by weight.
            tangents: Tangents v, [k, n].

        Returns:
            J^T J v, [k, n].
        """
        compute_update = _build_update_function(exact, weights, label, defense, relative_noise_std)

        def multiply_tangent(tangent: Tensor) -> Tensor:
            forward: Any = jvp(compute_update, (image,), (tangent.view(image.shape),))
            backward: Any = vjp(compute_update, image)
            return backward[1](forward[1])[0].flatten()

        return vmap(multiply_tangent)(tangents)

    weight_axis = None if exact.has_shared_weights else 0
    multiply = vmap(multiply_tangents, in_dims=(weight_axis, 0, 0, 0, None))
    victims_per_chunk = max(1, chunk_size // num_pixels)
    chunks = []
    for first in range(0, problem.num_victims, victims_per_chunk):
        victims = slice(first, first + victims_per_chunk)
        weights = exact.weights
        if not exact.has_shared_weights:
            weights = {name: weight[victims] for name, weight in exact.weights.items()}
        chunk_scale = {name: values[victims].double() for name, values in scale.items()}
        with ConvAsMatmul():
            rows = [
                multiply(weights, images[victims], labels[victims], chunk_scale, tangents)
                for tangents in unit_vectors.split(max(1, chunk_size // victims_per_chunk))
            ]
        chunks.append(torch.cat(rows, 1))
    information = torch.cat(chunks)
    return (information + information.mT) / 2


def _build_update_function(
    problem: Problem,
    weights: TensorDict,
    labels: Tensor,
    defense: Any,
    relative_noise_std: TensorDict,
) -> Callable[[Tensor], Tensor]:
    """Build the update of one victim as a function of its images.

    Args:
        problem: Model and loss.
        weights: {name: [...]}, of this victim.
        labels: [batch].
        defense: What the client does, without its noise, or None.
        relative_noise_std: {name: scalar}.

    Returns:
        The function from images [batch, c, h, w] to a vector.

    Raises:
        SettingError: The defense has no method `apply_without_noise`.
    """
    if defense is not None and not hasattr(defense, "apply_without_noise"):
        raise SettingError(
            f"{type(defense).__name__} has no method apply_without_noise, so the Cramér-Rao bound "
            "cannot be computed. Add the method."
        )

    def compute_image_gradient(image: Tensor, label: Tensor) -> TensorDict:
        return grad(
            lambda weights: problem.loss_fn(
                functional_call(problem.model, weights, (image[None],)), label[None]
            )
        )(weights)

    def compute_update(images: Tensor) -> Tensor:
        image_gradients = vmap(compute_image_gradient)(images, labels)  # {name: [batch, ...]}
        if defense is None:
            update = {name: gradient.mean(0) for name, gradient in image_gradients.items()}
        else:
            updates = defense.apply_without_noise(
                {name: gradient[None] for name, gradient in image_gradients.items()}
            )
            update = {name: gradient[0] for name, gradient in updates.items()}
        return torch.cat(
            [(update[name] / relative_noise_std[name]).flatten() for name in problem.update]
        )

    return compute_update
