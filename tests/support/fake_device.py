"""A second device on a machine that has none: tensors lie on the CPU, say that they lie elsewhere, and refuse to be mixed with others as a GPU's do.

`meta` is the name of that device, since torch can name it without a driver. What is computed is what a CPU computes; paths that are for CUDA alone
(graphs, kernels of our own) are not taken. Numbers of no dimension from the CPU and indices from it may be used there, as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from privot.runtime import Runtime

THERE = torch.device("meta")
aten: Any = torch.ops.aten
ACROSS = {aten.copy_.default, aten._to_copy.default}  # carry values from one device to another
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}


class Mixed(AssertionError):
    """Tensors of two devices in one operation."""


class Away(Tensor):
    """A tensor that says it lies elsewhere."""

    own: Tensor

    @staticmethod
    def __new__(cls, own: Tensor) -> Away:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            own.shape,
            strides=own.stride(),
            storage_offset=own.storage_offset(),
            dtype=own.dtype,
            device=THERE,
            requires_grad=False,
        )
        made.own = own
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Away({self.own!r})"

    def tolist(self) -> Any:
        return self.own.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


generators: list[
    torch.Generator
] = []  # made for elsewhere; an operation is handed another object, so they are known by their seeds


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    away = [each for each in given if isinstance(each, Away)]
    asked = kwargs.get("device")
    there = bool(away)
    if asked is not None:
        there = torch.device(asked).type == THERE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func in ACROSS:
        there = there if func is aten._to_copy.default else isinstance(args[0], Away)
    elif func in INDEXED:
        here = [each for each in given if not isinstance(each, Away)]
        if not isinstance(args[0], Away) and away:
            raise Mixed(f"{func}: a tensor of the CPU is indexed from elsewhere: {_said(given)}")
        values = [each for each in (args[2:3] if len(args) > 2 else ()) if isinstance(each, Tensor)]
        if isinstance(args[0], Away) and any(
            each is value and each.dim() for each in here for value in values
        ):
            raise Mixed(f"{func}: values of the CPU are put elsewhere: {_said(given)}")
    elif away and any(each.dim() and not isinstance(each, Away) for each in given):
        raise Mixed(f"{func}: {_said(given)}")
    generator = kwargs.get("generator")
    if (
        generator is not None
        and (generator.initial_seed() in {each.initial_seed() for each in generators}) != there
    ):
        raise Mixed(f"{func}: its generator is of another device")
    plain = lambda each: each.own if isinstance(each, Away) else each  # noqa: E731
    found = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if there:
        found = tree_map(lambda each: Away(each) if isinstance(each, Tensor) else each, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if there and away else found


def _said(given: list[Tensor]) -> str:
    return ", ".join(
        f"{'elsewhere' if isinstance(each, Away) else 'CPU'} {list(each.shape)}" for each in given
    )


class Elsewhere(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Made(TorchFunctionMode):
    """`torch.tensor` sends what it made past the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            wanted = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(wanted)
        return func(*args, **kwargs)


class Draws(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Draws:
        made = super().__new__(cls)
        made.where = torch.device(device)
        if made.where == THERE:
            generators.append(made)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where


# torch knows no half precision and no fused steps elsewhere
autocast = torch.autocast
adam = torch.optim.Adam


@contextlib.contextmanager
def elsewhere(monkeypatch: Any) -> Iterator[None]:
    """Within it every `Runtime` has its target elsewhere."""
    generators.clear()
    monkeypatch.setattr(torch, "Generator", Draws)
    monkeypatch.setattr(
        torch,
        "autocast",
        lambda kind, *args, **kwargs: autocast(
            "cpu" if kind == THERE.type else kind, *args, **kwargs
        ),
    )
    monkeypatch.setattr(
        torch.optim,
        "Adam",
        lambda *args, fused=None, capturable=None, **kwargs: adam(*args, **kwargs),
    )
    monkeypatch.setattr(Runtime, "torch_device", property(lambda self: THERE))
    with Elsewhere(), Made():
        yield
