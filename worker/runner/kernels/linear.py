"""Linear layers by the kernels, in bfloat16 on CPUs: packed once, for any number of rows.

A row's result does not depend on the other rows of the batch.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from worker.model.linear import Linear
from worker.runner.kernels.library import Kernels, LinearWeight, Operands

_STORE = 0
_MULTIPLE = 32
_CHUNK_BYTES = 64 << 20
_LARGEST = np.dtype([("value", np.float32), ("feature", np.int32)])
"""rf_largest"""


class _Arena:
    """Memory for packed weights, which lie one after another, so that even small ones can have large pages.

    What is left of a chunk is never touched, so it takes no memory.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to 64 bytes; `num_bytes` is a multiple of 64."""
        if num_bytes > len(self._left):
            self._left = torch.empty(max(num_bytes, _CHUNK_BYTES), dtype=torch.uint8)
            self._kernels.prefer_large_pages(self._left)
        taken, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return taken


class KernelLinear:
    """Implements `worker.model.linear.Linear`, and `LikeliestLinear`."""

    def __init__(self, kernels: Kernels, arena: _Arena, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._out_features, in_features = weight.shape
        assert in_features % _MULTIPLE == 0, "see supports()"
        size = kernels.library.rf_packed_bytes(self._out_features, in_features)
        self._packed = arena.take(size)
        self._bias = bias
        weight = weight.contiguous()
        kernels.library.rf_pack(weight.data_ptr(), self._out_features, in_features, self._packed.data_ptr())
        self.nbytes = size + (0 if bias is None else bias.nbytes)
        self.weight = LinearWeight(
            self._packed.data_ptr(), None if bias is None else bias.data_ptr(), self._out_features, in_features
        )
        """For the kernels; lives as long as this layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        x = x.contiguous()
        y = x.new_empty((len(x), self._out_features))
        operands = Operands(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), len(x), _STORE)
        self._kernels.library.rf_apply(self._kernels.team, ctypes.byref(self.weight), ctypes.byref(operands))
        return y

    def likeliest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `LikeliestLinear`: the results that this layer would give, but for the largest never stored."""
        x = x.contiguous()
        found = np.empty((self._kernels.num_threads, len(x)), _LARGEST)
        operands = Operands(x.data_ptr(), x.stride(0), None, 0, len(x), _STORE)
        self._kernels.library.rf_apply_largest(
            self._kernels.team, ctypes.byref(self.weight), ctypes.byref(operands), found.ctypes.data
        )
        values, features = found[0]["value"].copy(), found[0]["feature"].astype(np.int64)
        return torch.from_numpy(values), torch.from_numpy(features)


class KernelLinearBackend:
    """Implements `worker.model.linear.LinearBackend`."""

    name = "kernels"
    shares_weight = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._arena = _Arena(kernels)

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer with its own packed copy of the weight."""
        return KernelLinear(self._kernels, self._arena, weight, bias)
