"""A second device on a machine that has none.

Its tensors lie on the CPU, say that they lie elsewhere, and refuse to be mixed with tensors of the
CPU, as those of a GPU do. The device is called `meta`, a name that torch knows without a driver.
The values are those of the CPU; code for CUDA alone (graphs, kernels) does not run. As on a GPU,
numbers without a dimension and indices may come from the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from privot.runtime import Runtime

FAKE_DEVICE = torch.device("meta")
_aten: Any = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}  # carry values between devices
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
_autocast = torch.autocast
_adam = torch.optim.Adam


class MixedDevicesError(AssertionError):
    """Tensors of two devices met in one operation."""


class FakeDeviceTensor(Tensor):
    """A tensor that says it lies on the fake device.

    Attributes:
        cpu_values: The tensor on the CPU that holds the values.
    """

    cpu_values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> FakeDeviceTensor:
        """Wrap a tensor of the CPU."""
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=FAKE_DEVICE,
            requires_grad=False,
        )
        wrapper.cpu_values = values
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Show the values."""
        return f"FakeDeviceTensor({self.cpu_values!r})"

    def tolist(self) -> Any:
        """Copy the values, as a GPU would."""
        return self.cpu_values.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute an operation on the device of its tensors."""
        return _compute(func, args, kwargs or {})


# Operations get a copy of the generator, so a generator is recognised by its seed.
_generators: list[torch.Generator] = []


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation, and refuse tensors of two devices.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its named arguments.

    Returns:
        The result, on the device on which a GPU would leave it.

    Raises:
        MixedDevicesError: If tensors of two devices meet.
    """
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    has_fake_input = any(isinstance(tensor, FakeDeviceTensor) for tensor in tensors)
    is_on_fake = has_fake_input
    if kwargs.get("device") is not None:
        is_on_fake = torch.device(kwargs["device"]).type == FAKE_DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func in _COPIES:
        if func is not _aten._to_copy.default:
            is_on_fake = isinstance(args[0], FakeDeviceTensor)
    elif has_fake_input:
        _check_devices(func, args, tensors)
    generator = kwargs.get("generator")
    if generator is not None:
        fake_seeds = {fake.initial_seed() for fake in _generators}
        if (generator.initial_seed() in fake_seeds) != is_on_fake:
            raise MixedDevicesError(f"{func}: its generator belongs to another device")
    result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    if not is_on_fake:
        return result
    result = tree_map(_wrap, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if has_fake_input else result


def _check_devices(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Refuse an operation on the fake device that needs values of the CPU.

    Args:
        func: The operation.
        args: Its arguments.
        tensors: All its tensors.
    """
    cpu_tensors = [
        tensor for tensor in tensors if tensor.dim() and not isinstance(tensor, FakeDeviceTensor)
    ]
    if func in _INDEXING:
        new_values = args[2] if len(args) > 2 else None
        is_mixed = not isinstance(args[0], FakeDeviceTensor) or any(
            tensor is new_values for tensor in cpu_tensors
        )
    else:
        is_mixed = bool(cpu_tensors)
    if is_mixed:
        names = [
            f"{'fake' if isinstance(tensor, FakeDeviceTensor) else 'CPU'} {list(tensor.shape)}"
            for tensor in tensors
        ]
        raise MixedDevicesError(f"{func}: {', '.join(names)}")


def _unwrap(leaf: Any) -> Any:
    """Give the values of a tensor of the fake device; leave anything else as it is."""
    return leaf.cpu_values if isinstance(leaf, FakeDeviceTensor) else leaf


def _wrap(leaf: Any) -> Any:
    """Put a tensor on the fake device; leave anything else as it is."""
    return FakeDeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf


class _DispatchMode(TorchDispatchMode):
    """Sends every operation through `_compute`, also those without tensor arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _ConstructorMode(TorchFunctionMode):
    """Moves what `torch.tensor` builds, which does not pass the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


class _FakeGenerator(torch.Generator):
    """A generator that knows on which device it draws."""

    drawing_device: torch.device

    def __new__(cls, device: Any = "cpu") -> _FakeGenerator:
        generator = super().__new__(cls)
        generator.drawing_device = torch.device(device)
        if generator.drawing_device == FAKE_DEVICE:
            _generators.append(generator)
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.drawing_device


def _autocast_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Cast as on the CPU: torch knows no half precision on the fake device."""
    return _autocast("cpu" if device_type == FAKE_DEVICE.type else device_type, *args, **kwargs)


def _unfused_adam(*args: Any, fused: Any = None, capturable: Any = None, **kwargs: Any) -> Any:
    """Build Adam without fused steps, which torch does not know on the fake device."""
    return _adam(*args, **kwargs)


@contextlib.contextmanager
def simulate_second_device() -> Iterator[None]:
    """Make every `privot.Runtime` compute on the fake device.

    Raises:
        MixedDevicesError: If an operation inside mixes tensors of both devices.
    """
    _generators.clear()
    with (
        mock.patch.object(torch, "Generator", _FakeGenerator),
        mock.patch.object(torch, "autocast", _autocast_on_cpu),
        mock.patch.object(torch.optim, "Adam", _unfused_adam),
        mock.patch.object(Runtime, "torch_device", property(lambda runtime: FAKE_DEVICE)),
        _DispatchMode(),
        _ConstructorMode(),
    ):
        yield
