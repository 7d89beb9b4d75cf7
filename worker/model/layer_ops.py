"""What a layer does beside its linear layers and attention, as three operations, in plain torch.

    add_and_norm      hidden + added -> norm of it                           before attention and before the MLP
    rotate_and_keep   norm of each q and k head (Qwen3) -> rotary turn -> K and V to their slots of the KV pool
    gate              silu(gate) * up

On a GPU each is one kernel instead of two to ten (`worker.model.fused_ops`), which spares a decode the launches and a
prefill the reading and writing of activations between them. What stands here is what those are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

from worker.memory.kv_pool import KvPlace
from worker.model.rotary import rotate


class AddAndNorm(Protocol):
    """The residual connection and the norm behind it."""

    def __call__(self, hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """hidden + added, rounded to their dtype, and its RMSNorm: two of [num_tokens, hidden_size].

        May write into `hidden`, which is not to be used again. `added` None: the norm alone, of the same `hidden`.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each query's and key's head, weights [head_dim], of models that have it."""

    query: Tensor
    key: Tensor
    epsilon: float


class RotateAndKeep(Protocol):
    """From the fused projection of q, k and v to what attention needs."""

    def __call__(
        self, heads: Tensor, factors: tuple[Tensor, Tensor], norms: HeadNorms | None, place: KvPlace
    ) -> Tensor:
        """The queries, normed and rotated: [num_tokens, num_heads, head_dim]. K and V are written to `place`.

        `heads` [num_tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous: q, k, v; `factors` as
        `RotaryEmbedding.at` gives them.
        """
        ...


Gate: TypeAlias = Callable[[Tensor], Tensor]
"""silu of the left half times the right half: [num_tokens, 2 * size], contiguous -> [num_tokens, size]."""


@dataclass(frozen=True, slots=True)
class LayerOps:
    """One implementation of each."""

    add_and_norm: AddAndNorm
    rotate_and_keep: RotateAndKeep
    gate: Gate


def torch_ops(silu: Callable[[Tensor], Tensor] = functional.silu) -> LayerOps:
    """In plain torch, on any device. `silu`: one that does not depend on the batch, where that is asked for."""

    def gate(gate_up: Tensor) -> Tensor:
        left, right = gate_up.chunk(2, dim=-1)
        return silu(left).mul_(right)

    return LayerOps(add_and_norm, rotate_and_keep, gate)


def add_and_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Implements `AddAndNorm`."""
    if added is not None:
        hidden = hidden + added
    return hidden, functional.rms_norm(hidden, weight.shape, weight, epsilon)


def rotate_and_keep(heads: Tensor, factors: tuple[Tensor, Tensor], norms: HeadNorms | None, place: KvPlace) -> Tensor:
    """Implements `RotateAndKeep`."""
    num_kv_heads = place.keys.shape[1]
    num_rotated = heads.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
    if norms is not None:
        q, k = (
            functional.rms_norm(each, weight.shape, weight, norms.epsilon)
            for each, weight in ((rotated[:, :num_heads], norms.query), (rotated[:, num_heads:], norms.key))
        )
        rotated = torch.cat((q, k), dim=1)
    rotated = rotate(rotated, factors)  # q and k lie side by side and are rotated in one go
    place.write(rotated[:, num_heads:], v)
    return rotated[:, :num_heads]
