"""Linear layers as callables, made by a linear backend that may store the weight in a form of its own.

The model knows only `Linear`. A backend is chosen once, at load; another one (a device's packed format, a quantized
kernel) is a new `LinearBackend` and no change to the model.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as functional
from torch import Tensor


class Linear(Protocol):
    """y = x W^T + b for x [num_tokens, in_features]; rows are computed independently."""

    @property
    def nbytes(self) -> int:
        """Bytes the weight takes on its device."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        ...


@runtime_checkable
class LikeliestLinear(Linear, Protocol):
    """A layer that finds a row's largest result without storing the others."""

    def likeliest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row of x the largest result, float32, and the first feature that has it, int64; NaN is largest."""
        ...


class LinearBackend(Protocol):
    """Makes linear layers of weights [out_features, in_features], which it may keep, copy or repack."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    @property
    def shares_weight(self) -> bool:
        """Layers use the memory of the weight they were made from, instead of a copy."""
        ...

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer with the given weight."""
        ...


class DenseLinear:
    """The weight as it is, through torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return functional.linear(x, self._weight, self._bias)


class DenseBackend:
    """Any device, any dtype."""

    name = "dense"
    shares_weight = True

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer that shares the given weight."""
        return DenseLinear(weight, bias)


class PackedLinear:
    """The weight in the blocked layout of oneDNN, so that it need not be reordered on each call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PackedBackend.ROWS_HINT)
        self._bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result


class PackedBackend:
    """bfloat16 on a CPU: one layout serves decoding and prefill, 1.4 to 1.8 times faster than `DenseBackend` at 1 to 8
    rows and as fast at 512 (tests/bench/bench_torch_runner.py prints both).
    """

    name = "onednn-packed"
    shares_weight = False
    ROWS_HINT = 8
    """The number of rows that oneDNN chooses the blocking for."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer with its own packed copy of the weight."""
        return PackedLinear(weight, bias)


def choose_linear_backend(device: torch.device, dtype: torch.dtype) -> LinearBackend:
    """The fastest backend that works here: packed for bfloat16 on a CPU with oneDNN, else dense.

    float32 stays dense: on CPUs torch gives it to MKL, which packing does not beat.
    """
    if device.type == "cpu" and dtype == torch.bfloat16 and _packing_works():
        return PackedBackend()
    return DenseBackend()


def _packing_works() -> bool:
    """The packed operators are internal to torch: a build without them must not keep us from serving."""
    weight = torch.eye(32, dtype=torch.bfloat16)
    try:
        return bool(torch.equal(PackedLinear(weight, None)(weight), weight))
    except (AttributeError, RuntimeError, TypeError):
        return False
