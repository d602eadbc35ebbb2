"""Whether an update can be this net's, and whether the net can be attacked: each refusal is one line that says how to mend it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from privot.attacks.inversion.conv_as_matmul import Patches
from privot.errors import DataError, SettingError

Loss = Callable[
    [Tensor, Tensor], Tensor
]  # (logits [batch, classes], labels [batch] or their probabilities [batch, classes]) -> scalar
Tensors = dict[str, Tensor]


def trainable(net: nn.Module) -> Tensors:
    """{name: [...]}, what a client sends updates of."""
    return {name: each.detach() for name, each in net.named_parameters() if each.requires_grad}


def check(
    net: nn.Module,
    update: Tensors,
    *,
    loss: Loss | None = None,
    shape: tuple[int, ...] | None = None,
    batch: int = 1,
) -> None:
    """Refuse an ``update`` {name: [N, ...]} that cannot be this net's; with ``loss`` and ``shape`` also a net that cannot be attacked.

    >>> net = nn.Linear(2, 3)
    >>> check(net, {"weight": torch.zeros(1, 3, 2)})
    Traceback (most recent call last):
    ...
    privot.errors.DataError: update: bias is missing; send every trainable parameter's gradient, or freeze what is not sent
    """
    ready(net)
    own = trainable(net)
    if missing := sorted(set(own) - set(update)):
        raise DataError(
            f"update: {missing[0]} is missing; send every trainable parameter's gradient, or freeze what is not sent"
        )
    if strange := sorted(set(update) - set(own)):
        raise DataError(
            f"update: the net has no trainable parameter {strange[0]}; give its own model"
        )
    count = len(next(iter(update.values())))
    for name, each in update.items():
        if each.shape[1:] != own[name].shape or len(each) != count:
            wanted = [count, *own[name].shape]
            raise DataError(
                f"update: {name} is {list(each.shape)}, but the net wants {wanted} (victims first); give its own model"
            )
        if not each.isfinite().all():
            raise DataError(
                f"update: {name} is not finite; look for an overflow (learning rate, half precision) and send the update again"
            )
    if loss is not None and shape is not None:
        _twice(net, loss, shape, batch)


def ready(net: nn.Module) -> None:
    """Refuse layers whose output depends on chance or on the rest of the batch."""
    for name, each in net.named_modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and (
            each.training or each.running_mean is None
        ):
            raise SettingError(
                f"{name or 'the net'}: batch norm in training mode mixes the images of a batch; call net.eval()"
            )
        if isinstance(each, nn.modules.dropout._DropoutNd) and each.training and each.p > 0:
            raise SettingError(
                f"{name or 'the net'}: dropout in training mode draws at random; call net.eval()"
            )
    if not trainable(net):
        raise SettingError(
            "the net has no trainable parameter, so there is no update: set requires_grad"
        )


def _twice(net: nn.Module, loss: Loss, shape: tuple[int, ...], batch: int) -> None:
    """The slope of an attack at an image of noise, beside difference quotients: what cannot be differentiated twice is found here.

    Along one direction a wrong slope may be right by chance, so there are eight.
    """
    held = {
        name: each.detach().double() if each.is_floating_point() else each
        for name, each in net.state_dict().items()
    }
    weights = {name: held[name] for name in trainable(net)}
    rest = {name: each for name, each in held.items() if name not in weights}
    some = next(iter(weights.values()))
    generator = torch.Generator().manual_seed(0)
    images, *ways = torch.rand(9, batch, *shape, generator=generator, dtype=torch.float64).to(
        some.device
    )
    ways = [each - 0.5 for each in ways]
    labels = torch.zeros(batch, dtype=torch.long, device=some.device)

    def size(image: Tensor) -> Tensor:
        found = grad(lambda own: loss(functional_call(net, own | rest, (image,)), labels))(weights)
        return torch.stack([each.square().sum() for each in found.values()]).sum()

    try:
        with Patches():
            slope = vmap(grad(size))(images[None])[0]
            beside = [(size(images + 1e-5 * along), size(images - 1e-5 * along)) for along in ways]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        why = (
            str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        )
        raise SettingError(
            f"the net or its loss cannot be differentiated twice under torch.func ({why}); replace that layer"
        ) from None
    if not slope.isfinite().all() or not slope.any():
        raise SettingError(
            "no second derivative: the update does not follow the image; replace hard steps (sign, round, argmax)"
        )
    for along, (ahead, behind) in zip(ways, beside, strict=True):
        quotient = (ahead - behind) / 2e-5
        if ((slope * along).sum() - quotient).abs() > 1e-2 * quotient.abs() + 1e-6 * ahead.abs():
            why = "a layer's own backward cannot be differentiated; write it in torch's functions"
            raise SettingError(f"second derivatives are wrong: {why}")


def gradient_of(net: nn.Module, loss: Loss) -> Callable[[Tensors, Tensor, Tensor], Tensors]:
    """The function (weights, images [batch, c, h, w], labels [batch]) -> gradients {name: [...]} of one client; goes under a vmap."""

    def gradient(weights: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        return grad(lambda own: loss(functional_call(net, own, (images,)), labels))(weights)

    return gradient
