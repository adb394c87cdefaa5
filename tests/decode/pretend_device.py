"""A device that is not the default one, without the hardware: CPU data under the label "cuda:0".

Inside `pretend_cuda`, tensors asked for on "cuda" compute on the CPU but say that they are on
cuda:0, and a call that mixes them with tensors of the host fails as it does on a GPU. So a tensor
that is made without its device is found, and so is native code, which refuses the label. Whether a
GPU has each of the operators, and what it computes, is not shown by this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "cuda:0"


class PretendTensor(Tensor):
    """The label; ``inner`` has the data."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(f"{func} took a tensor of the pretended device outside of its mode.")


class MixedDevicesError(RuntimeError):
    """A call was given tensors of the pretended device and of the host."""


class pretend_cuda(TorchFunctionMode):  # noqa: N801
    """Within it, "cuda" is the pretended device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__ and isinstance(args[0], PretendTensor):
            return torch.device(DEVICE)
        if func is Tensor.cpu or (func is Tensor.to and args[1] == "cpu"):
            return host(args[0])
        if func is Tensor.to and _is_pretended(args[1]):
            return args[0] if isinstance(args[0], PretendTensor) else PretendTensor(args[0].clone())
        if _is_pretended(kwargs.get("device")):
            return PretendTensor(func(*args, **{**kwargs, "device": "cpu"}))
        labelled = [x for x in tree_leaves((args, kwargs)) if isinstance(x, PretendTensor)]
        if not labelled:
            return func(*args, **kwargs)
        _check_hosts(func, args, kwargs)
        own = {id(tensor.inner): tensor for tensor in labelled}
        plain_args, plain_kwargs = tree_map(host, (args, kwargs))
        if func is torch.mm and "out_dtype" in plain_kwargs:  # of a GPU only
            wide = [x.to(plain_kwargs["out_dtype"]) for x in plain_args]
            return PretendTensor(torch.mm(*wide))
        out = func(*plain_args, **plain_kwargs)
        # What was changed in place keeps its label object.
        return tree_map(lambda x: own[id(x)] if id(x) in own else _label(x), out)


def host(value: Any) -> Any:
    """The data of a tensor of the pretended device; anything else as it is."""
    return value.inner if isinstance(value, PretendTensor) else value


def _label(value: Any) -> Any:
    return PretendTensor(value) if isinstance(value, Tensor) else value


def _is_pretended(device: Any) -> bool:
    return isinstance(device, torch.device | str) and torch.device(device).type == "cuda"


def _check_hosts(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """As on a GPU, single numbers, indices and the source of a copy may come from the host."""
    if func is Tensor.copy_:
        return
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        args = (args[0], *args[2:])
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and not isinstance(value, PretendTensor) and value.dim():
            name = getattr(func, "__name__", func)
            raise MixedDevicesError(f"{name} mixes {DEVICE} with a tensor of the host.")
