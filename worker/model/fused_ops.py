"""The operations of `worker.model.layer_ops` for GPUs, each as one kernel of Triton. Importing this needs Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.memory.kv_pool import KvPlace
from worker.model import triton_kernels as kernels
from worker.model.layer_ops import HeadNorms, LayerOps

_GATE_BLOCK = 1024
_PAIRS = 1024
"""Of elements that turn together, in a program of `rotate_and_keep`: whole heads, one at least."""
_ELEMENTS_PER_WARP = 512
"""Of a row that is normed: 16 a thread, until there are as many warps as a block is to have."""
_MOST_WARPS = 16


def add_and_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Implements `AddAndNorm`, in place."""
    num_tokens, size = hidden.shape
    assert hidden.is_contiguous()
    assert added is None or (added.is_contiguous() and added.shape == hidden.shape)
    normed = torch.empty_like(hidden)
    block = next_power_of_two(size)
    if num_tokens:
        kernels.add_and_norm[(num_tokens,)](
            hidden,
            hidden if added is None else added,
            weight,
            normed,
            epsilon,
            SIZE=size,
            BLOCK=block,
            HAS_ADDED=added is not None,
            num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), _MOST_WARPS),
        )
    return hidden, normed


def rotate_and_keep(heads: Tensor, factors: tuple[Tensor, Tensor], norms: HeadNorms | None, place: KvPlace) -> Tensor:
    """Implements `RotateAndKeep`."""
    num_tokens, num_all, head_dim = heads.shape
    num_kv_heads = place.keys.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    cosine, signed_sine = factors
    assert all(each.is_contiguous() for each in (heads, cosine, signed_sine, place.keys, place.values, place.slots))
    assert len(cosine) == len(signed_sine) == len(place.slots) == num_tokens
    queries = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    block_half = next_power_of_two(head_dim // 2)
    block_heads = min(max(_PAIRS // block_half, 1), next_power_of_two(num_all))
    if num_tokens:
        kernels.rotate_and_keep[(num_tokens, -(-num_all // block_heads))](
            heads,
            cosine,
            signed_sine,
            heads if norms is None else norms.query,
            heads if norms is None else norms.key,
            place.slots,
            queries,
            place.keys,
            place.values,
            0.0 if norms is None else norms.epsilon,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_HALF=block_half,
            BLOCK_HEADS=block_heads,
            HAS_NORMS=norms is not None,
            num_warps=4,
        )
    return queries


def gate(gate_up: Tensor) -> Tensor:
    """Implements `Gate`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        kernels.gate[(num_tokens, -(-size // _GATE_BLOCK))](gate_up, out, SIZE=size, BLOCK=_GATE_BLOCK, num_warps=4)
    return out


def next_power_of_two(n: int) -> int:
    """The least that is `n` or more."""
    return 1 << (n - 1).bit_length()


FUSED = LayerOps(add_and_norm, rotate_and_keep, gate)
