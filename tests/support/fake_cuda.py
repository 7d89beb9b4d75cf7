"""A CUDA device of tensors without contents: a step is launched on it, and what would wait for the device is found.

On a GPU, whoever asks for a number of the device waits until all that was launched has been computed; so does a copy
from memory that is not pinned. Here tensors have shapes, dtypes and the device "cuda" alone (FakeTensorMode of torch),
so to ask for a number is an error, and copies between host and device are checked: their side on the host has to be
pinned, and they must not block. What an operation does within itself is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
_TAKES_SCALARS_OF_THE_DEVICE = {_aten.where.self, _aten.index_put_.default, _aten.index_put.default}
"""Given a number in a tensor of the host, these copy it to the device, and wait; others pass it to their kernels."""


class DeviceWaited(Exception):
    """An operation that waits for the device; the message names it."""


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """While active, tensors may be made on "cuda", and what would wait for it raises."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        pinned = _Pinned()
        patch.setattr(Tensor, "pin_memory", lambda tensor: pinned.pin(tensor.clone()))
        patch.setattr(Tensor, "to", _to)
        patch.setattr(Tensor, "__getitem__", _get)
        patch.setattr(Tensor, "__setitem__", _set)
        patch.setattr(Tensor, "__invert__", lambda tensor: _aten.bitwise_not.default(tensor))
        patch.setattr(Tensor, "data_ptr", lambda _tensor: 0)
        patch.setattr(Tensor, "__iter__", lambda tensor: iter([tensor[index] for index in range(len(tensor))]))
        patch.setattr(torch, "empty", _empty(torch.empty, pinned))
        patch.setattr(torch.cuda, "set_device", lambda _device: None)
        with FakeCuda(pinned) as device:
            patch.setattr(Tensor, "copy_", device.copy)
            yield device


class _Pinned:
    """Which tensors of the host are pinned."""

    def __init__(self) -> None:
        self._pinned: list[Tensor] = []  # kept alive, so that no other tensor gets the place of one

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(tensor)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(tensor is each for each in self._pinned)


def _to(tensor: Tensor, *given: Any, non_blocking: bool = False) -> Tensor:
    """`Tensor.to`: torch without CUDA refuses it, as it does indexing below, even for tensors without contents."""
    device = next((each for each in given if isinstance(each, torch.device | str)), tensor.device)
    dtype = next((each for each in given if isinstance(each, torch.dtype)), tensor.dtype)
    copied: Tensor = _aten._to_copy.default(tensor, device=torch.device(device), dtype=dtype, non_blocking=non_blocking)
    return copied


def _view(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """`tensor` with the integers, slices and Nones of an index applied, and its tensors, by dimension."""
    tensors: list[Tensor | None] = []
    for each in index if isinstance(index, tuple) else (index,):
        dim = len(tensors)
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, int):
            tensor = _aten.select.int(tensor, dim, each)
        elif each is None:
            tensor = _aten.unsqueeze.default(tensor, dim)
            tensors.append(None)
        else:
            tensor = _aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1)
            tensors.append(None)
    return tensor, tensors


def _get(tensor: Tensor, index: Any) -> Tensor:
    viewed, tensors = _view(tensor, index)
    if all(each is None for each in tensors):
        return viewed
    taken: Tensor = _aten.index.Tensor(viewed, tensors)
    return taken


def _set(tensor: Tensor, index: Any, value: Any) -> None:
    viewed, tensors = _view(tensor, index)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)  # by a kernel, as torch has it
    if all(each is None for each in tensors):
        viewed.copy_(value)
    else:
        _aten.index_put_.default(viewed, tensors, value)


def _empty(make: Any, pinned: _Pinned) -> Any:
    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made: Tensor = make(*size, **options)
        return pinned.pin(made) if pin_memory else made

    return empty


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operation."""

    def __init__(self, pinned: _Pinned) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pinned = pinned
        self._may_wait = False
        self._may_copy = True
        self.num_copies = 0
        """Between host and device, so far."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Before requests come, it may wait."""
        self._may_wait = True
        yield
        self._may_wait = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A CUDA graph would replay copies with the host's memory of now."""
        self._may_copy = False
        yield
        self._may_copy = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._may_wait:
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    @property
    def copy(self) -> Any:
        """`Tensor.copy_`."""

        def copy(tensor: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
            assert other.expand(tensor.shape).shape == tensor.shape
            if not self._may_wait:
                is_pinned = any(map(self._pinned.is_pinned, (tensor, other)))
                self._check_copy(other, tensor.device, {"non_blocking": non_blocking}, is_pinned)
            return tensor

        return copy

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is _aten._to_copy.default:
            self._check_copy(args[0], kwargs.get("device"), kwargs, self._pinned.is_pinned(args[0]))
        elif func is _aten._local_scalar_dense.default and tensors[0].device.type == "cuda":
            raise DeviceWaited("a number of the device is asked for")
        elif func in _TAKES_SCALARS_OF_THE_DEVICE and len({tensor.device.type for tensor in tensors}) > 1:
            raise DeviceWaited(f"{func} is given a tensor of the host")

    def _check_copy(self, tensor: Tensor, to: torch.device | None, options: dict[str, Any], pinned: bool) -> None:
        if to is None or torch.device(to).type == tensor.device.type:
            return
        self.num_copies += 1
        if not self._may_copy:
            raise DeviceWaited(f"a copy of {tuple(tensor.shape)} from {tensor.device} to {to} is recorded")
        if not options.get("non_blocking") or not pinned:
            raise DeviceWaited(f"a copy of {tuple(tensor.shape)} from {tensor.device} to {to} waits")
