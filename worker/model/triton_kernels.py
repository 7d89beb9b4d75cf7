"""The kernels of `worker.model.fused_ops`. Importing this compiles nothing; TRITON_INTERPRET=1 in the environment, set
before triton is imported, has them computed by Triton's interpreter on a CPU.

Sizes are constants of the compiled kernel and nothing that is passed depends on the batch, so each is compiled once for
a model; where a tensor begins is not specialized on either, as the columns of a recorded step's inputs begin anywhere.
A token is computed by programs of its own, in float32, and its sums are over its own elements in an order that follows
from the sizes alone: its bits do not depend on what else is in the batch. Rows that are computed twice, as padding of
recorded steps is, write the same numbers to the same slots.

Offsets of tokens and slots are 64 bits wide: a KV pool, and a chunk's activations, may have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_and_norm(  # type: ignore[no-untyped-def]
    hidden,  # [num_tokens, SIZE], read, and where something is added, written
    added,  # the same; not read unless HAS_ADDED
    weight,  # [SIZE]
    normed,  # [num_tokens, SIZE]
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
    HAS_ADDED: tl.constexpr,
):
    """Grid: (num_tokens,). The sum is rounded before it is normed: the next layer sees it so."""
    element = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * SIZE + element
    is_there = element < SIZE
    total = tl.load(hidden + at, mask=is_there, other=0.0).to(tl.float32)
    if HAS_ADDED:
        total += tl.load(added + at, mask=is_there, other=0.0).to(tl.float32)
        rounded = total.to(hidden.dtype.element_ty)
        tl.store(hidden + at, rounded, mask=is_there)
        total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + epsilon)
    factor = tl.load(weight + element, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed + at, (total * scale * factor).to(normed.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize_on_alignment=["slots"])  # type: ignore[untyped-decorator]
def rotate_and_keep(  # type: ignore[no-untyped-def]
    heads,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]: q, k, v
    cosine,  # [num_tokens, HEAD_DIM], of which the left half is read
    signed_sine,  # the same, of which the right half is read: the left one is its negative
    query_norm,  # [HEAD_DIM]; not read unless HAS_NORMS, as the next one
    key_norm,
    slots,  # int64 [num_tokens]
    queries,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    keys,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    values,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # HEAD_DIM / 2, rounded up to a power of two
    BLOCK_HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Grid: (num_tokens, blocks of heads). A pair of elements that turn together stays within one thread:

    low, high = low * cos - high * sin, high * cos + low * sin    heads [0, NUM_HEADS + NUM_KV_HEADS)
    low, high as they are                                         the rest: values
    """
    half: tl.constexpr = HEAD_DIM // 2
    num_rotated: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    element = tl.arange(0, BLOCK_HALF)
    in_half = element < half
    is_there = (head < num_rotated + NUM_KV_HEADS)[:, None] & in_half[None, :]
    at = head[:, None] * HEAD_DIM + element[None, :]
    own = heads + token * ((num_rotated + NUM_KV_HEADS) * HEAD_DIM)
    low_given = tl.load(own + at, mask=is_there, other=0.0)
    high_given = tl.load(own + at + half, mask=is_there, other=0.0)
    low, high = low_given.to(tl.float32), high_given.to(tl.float32)

    is_query = (head < NUM_HEADS)[:, None]
    if HAS_NORMS:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        of_query = tl.load(query_norm + element, mask=in_half, other=0.0).to(tl.float32)[None, :]
        of_key = tl.load(key_norm + element, mask=in_half, other=0.0).to(tl.float32)[None, :]
        low *= scale * tl.where(is_query, of_query, of_key)
        of_query = tl.load(query_norm + half + element, mask=in_half, other=0.0).to(tl.float32)[None, :]
        of_key = tl.load(key_norm + half + element, mask=in_half, other=0.0).to(tl.float32)[None, :]
        high *= scale * tl.where(is_query, of_query, of_key)
    factor_at = token * HEAD_DIM + element
    cos = tl.load(cosine + factor_at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(signed_sine + factor_at + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    low_turned = (low * cos - high * sin).to(low_given.dtype)
    high_turned = (high * cos + low * sin).to(low_given.dtype)

    queries_at = queries + token * (NUM_HEADS * HEAD_DIM) + at
    tl.store(queries_at, low_turned, mask=is_there & is_query)
    tl.store(queries_at + half, high_turned, mask=is_there & is_query)
    slot_at = tl.load(slots + token) * (NUM_KV_HEADS * HEAD_DIM)
    is_key = is_there & (head >= NUM_HEADS)[:, None] & (head < num_rotated)[:, None]
    keys_at = keys + slot_at + (at - NUM_HEADS * HEAD_DIM)
    tl.store(keys_at, low_turned, mask=is_key)
    tl.store(keys_at + half, high_turned, mask=is_key)
    is_value = is_there & (head >= num_rotated)[:, None]
    values_at = values + slot_at + (at - num_rotated * HEAD_DIM)
    tl.store(values_at, low_given, mask=is_value)
    tl.store(values_at + half, high_given, mask=is_value)


@triton.jit  # type: ignore[untyped-decorator]
def gate(  # type: ignore[no-untyped-def]
    gate_up,  # [num_tokens, 2 * SIZE]
    out,  # [num_tokens, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_tokens, blocks of elements)."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = element < SIZE
    left = tl.load(gate_up + token * (2 * SIZE) + element, mask=is_there, other=0.0).to(tl.float32)
    right = tl.load(gate_up + token * (2 * SIZE) + SIZE + element, mask=is_there, other=0.0).to(tl.float32)
    gated = left / (1 + tl.exp(-left)) * right
    tl.store(out + token * SIZE + element, gated.to(out.dtype.element_ty), mask=is_there)
