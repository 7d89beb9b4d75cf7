"""Linear layers by the kernels, for bfloat16 on CPUs that compute it: packed once, for any number of rows.

A row's result does not depend on the other rows of the batch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from worker.model.linear import Linear
from worker.runner.kernels.library import Kernels, LinearWeight, Operands

_STORE = 0
_MULTIPLE = 32


class KernelLinear:
    """Implements `worker.model.linear.Linear`."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._out_features, in_features = weight.shape
        assert in_features % _MULTIPLE == 0, "see supports()"
        size = kernels.library.rf_packed_bytes(self._out_features, in_features)
        self._packed = torch.empty(size, dtype=torch.uint8)
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


class KernelLinearBackend:
    """Implements `worker.model.linear.LinearBackend`."""

    name = "kernels"
    shares_weight = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer with its own packed copy of the weight."""
        return KernelLinear(self._kernels, weight, bias)
