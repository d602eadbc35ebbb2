"""Checks of an update and of a model: can both belong together, and can they be attacked?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from privot.attacks.inversion.conv_as_matmul import ConvAsMatmul
from privot.errors import DataError, SettingError

# (logits [batch, classes], labels [batch] or label probabilities [batch, classes]) -> scalar
LossFunction = Callable[[Tensor, Tensor], Tensor]
TensorDict = dict[str, Tensor]

NUM_PROBE_DIRECTIONS = 8  # along one direction a wrong derivative may be right by chance
DIFFERENCE_STEP = 1e-5


def get_trainable_parameters(model: nn.Module) -> TensorDict:
    """Returns {name: [...]}, the parameters whose gradients a client sends."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def check_update(
    model: nn.Module,
    update: TensorDict,
    *,
    loss_fn: LossFunction | None = None,
    shape: tuple[int, ...] | None = None,
    batch_size: int = 1,
) -> None:
    """Check that an update can be of this model and, given a loss, that it can be attacked.

    Args:
        model: The model that sent the update.
        update: Gradients {name: [N, ...]}, victims first.
        loss_fn: The loss of the clients. Together with ``shape`` it also checks that the gradient
            can be differentiated with respect to the images.
        shape: (channels, height, width) of one image.
        batch_size: Images behind one update, for the check of derivatives.

    Raises:
        DataError: The update has other names or shapes than the model, or is not finite.
        SettingError: The model depends on chance, or cannot be differentiated twice.

    >>> check_update(nn.Linear(2, 3), {"weight": torch.zeros(1, 3, 2)})
    Traceback (most recent call last):
    ...
    privot.errors.DataError: update: bias is missing. Send the gradient of every trainable \
parameter, or freeze the parameters that are not sent.
    """
    check_deterministic(model)
    parameters = get_trainable_parameters(model)
    if missing := sorted(set(parameters) - set(update)):
        raise DataError(
            f"update: {missing[0]} is missing. Send the gradient of every trainable parameter, "
            "or freeze the parameters that are not sent."
        )
    if unknown := sorted(set(update) - set(parameters)):
        raise DataError(
            f"update: the model has no trainable parameter {unknown[0]}. "
            "Pass the model that sent the update."
        )
    count = len(next(iter(update.values())))
    for name, gradient in update.items():
        if gradient.shape[1:] != parameters[name].shape or len(gradient) != count:
            expected_shape = [count, *parameters[name].shape]
            raise DataError(
                f"update: {name} has shape {list(gradient.shape)}, but the model needs "
                f"{expected_shape} (victims first). Pass the model that sent the update."
            )
        if not gradient.isfinite().all():
            raise DataError(
                f"update: {name} is not finite. Look for an overflow (learning rate, half "
                "precision) and send the update again."
            )
    if loss_fn is not None and shape is not None:
        _check_second_derivative(model, loss_fn, shape, batch_size)


def check_deterministic(model: nn.Module) -> None:
    """Check that the model's output depends neither on chance nor on the rest of the batch.

    Raises:
        SettingError: a layer is in training mode, or no parameter is trainable.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or module.running_mean is None
        ):
            raise SettingError(
                f"{name or 'the model'}: batch norm in training mode mixes the images of a "
                "batch. Call model.eval()."
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise SettingError(
                f"{name or 'the model'}: dropout in training mode is random. Call model.eval()."
            )
    if not get_trainable_parameters(model):
        raise SettingError(
            "The model has no trainable parameter, so there is no update. Set requires_grad."
        )


def build_gradient_function(
    model: nn.Module, loss_fn: LossFunction
) -> Callable[[TensorDict, Tensor, Tensor], TensorDict]:
    """Build the function (weights, images [batch, c, h, w], labels [batch]) -> {name: [...]}.

    The function returns the gradient of one client and can be used under a vmap.
    """

    def _compute_gradient(weights: TensorDict, images: Tensor, labels: Tensor) -> TensorDict:
        return grad(lambda weights: loss_fn(functional_call(model, weights, (images,)), labels))(
            weights
        )

    return _compute_gradient


def _check_second_derivative(
    model: nn.Module, loss_fn: LossFunction, shape: tuple[int, ...], batch_size: int
) -> None:
    """Compare the input gradient of |dL/dW|^2 at a noise image with difference quotients.

    A model that cannot be differentiated twice fails here.

    Args:
        model: The model to check.
        loss_fn: Loss of the model.
        shape: (channels, height, width) of one image.
        batch_size: Images behind one update.
    """
    state = {
        name: value.detach().double() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    weights = {name: state[name] for name in get_trainable_parameters(model)}
    constants = {name: value for name, value in state.items() if name not in weights}
    device = next(iter(weights.values())).device
    generator = torch.Generator().manual_seed(0)
    images, *noise = torch.rand(
        1 + NUM_PROBE_DIRECTIONS, batch_size, *shape, generator=generator, dtype=torch.float64
    ).to(device)
    directions = [values - 0.5 for values in noise]
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)

    def compute_squared_gradient_norm(images: Tensor) -> Tensor:
        gradients = grad(
            lambda weights: loss_fn(functional_call(model, weights | constants, (images,)), labels)
        )(weights)
        return torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()

    try:
        with ConvAsMatmul():
            derivative = vmap(grad(compute_squared_gradient_norm))(images[None])[0]
            norms = [
                (
                    compute_squared_gradient_norm(images + DIFFERENCE_STEP * direction),
                    compute_squared_gradient_norm(images - DIFFERENCE_STEP * direction),
                )
                for direction in directions
            ]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        message = str(error).strip()
        reason = message.splitlines()[0][:120] if message else type(error).__name__
        raise SettingError(
            f"The model or its loss cannot be differentiated twice under torch.func ({reason}). "
            "Replace that layer."
        ) from None
    if not derivative.isfinite().all() or not derivative.any():
        raise SettingError(
            "The update does not depend smoothly on the image: the second derivative is 0 or not "
            "finite. Replace piecewise constant layers (sign, round, argmax)."
        )
    for direction, (norm_ahead, norm_behind) in zip(directions, norms, strict=True):
        quotient = (norm_ahead - norm_behind) / (2 * DIFFERENCE_STEP)
        error_bound = 1e-2 * quotient.abs() + 1e-6 * norm_ahead.abs()
        if ((derivative * direction).sum() - quotient).abs() > error_bound:
            raise SettingError(
                "The second derivative is wrong: a layer has a backward of its own that cannot "
                "be differentiated. Write that layer in torch functions."
            )
