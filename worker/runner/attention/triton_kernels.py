"""The kernels of `TritonBackend`. Importing this compiles nothing; TRITON_INTERPRET=1 in the environment, set before
triton is imported, has them computed by Triton's interpreter on a CPU.

One program of `attend_blocks` computes a block of queries of one sequence, for all query heads that share a KV head:

    row m of the block     token m // GROUP of the block, head m % GROUP of the KV head's group
    keys                   positions in tiles of BLOCK_N from position 0 on, looked up page by page, up to the block's
                           last token; with several splits, a contiguous share of the tiles each
    softmax                online (Milakov and Gimelshein, 2018), in base 2 and float32, as in FlashAttention

Where keys are split, which a few sequences with long contexts need to occupy a GPU, `combine_splits` puts the parts
together (as in Flash-Decoding). A row's result depends on nothing but its own sequence and position, to the bit, as
long as the block's shape is the same and nothing is split: a tile that a row does not see multiplies by one and adds 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


# A step's longest sequence must not decide how the kernel is compiled: all requests would wait for the compiler.
@triton.jit(do_not_specialize=["pages_stride"])  # type: ignore[untyped-decorator]
def attend_blocks(  # type: ignore[no-untyped-def]
    queries,  # [num_tokens, num_heads, head_dim]
    keys,  # [num_slots, num_kv_heads, head_dim]
    values,
    out,  # [num_tokens, num_heads, head_dim]
    part_sums,  # float32 [num_blocks, num_heads, NUM_SPLITS, BLOCK_D]; used where NUM_SPLITS > 1, as the next two
    part_maxima,  # float32 [num_blocks, num_heads, NUM_SPLITS]
    part_totals,
    block_sequences,  # int32 [num_blocks]: whose queries a block has, and which of them is its first
    block_firsts,
    query_offsets,  # see PagedBatch
    ends,
    pages,
    pages_stride,
    scale,  # log2(e) / sqrt(head_dim)
    query_token_stride,
    query_head_stride,
    kv_slot_stride,
    kv_head_stride,
    out_token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least BLOCK_Q * GROUP
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Grid: (num_blocks, num_kv_heads, NUM_SPLITS). With splits, BLOCK_Q is 1."""
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(block_sequences + block)
    first = tl.load(block_firsts + block)
    offset = tl.load(query_offsets + sequence)
    length = tl.load(query_offsets + sequence + 1) - offset
    end = tl.load(ends + sequence)
    start = end - length

    row = tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < BLOCK_Q * GROUP) & (token < length)
    in_head = element < HEAD_DIM
    query_at = (offset + token).to(tl.int64)[:, None] * query_token_stride + head[:, None] * query_head_stride
    is_query = is_row[:, None] & in_head[None, :]
    query = tl.load(queries + query_at + element[None, :], mask=is_query, other=0.0)

    visible = tl.minimum(start + first + BLOCK_Q, end)
    num_tiles = tl.cdiv(visible, BLOCK_N)
    tiles_each = tl.cdiv(num_tiles, NUM_SPLITS)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(split * tiles_each, tl.minimum(num_tiles, (split + 1) * tiles_each)):
        position = tile * BLOCK_N + column
        is_held = position < visible
        page = tl.load(pages + sequence * pages_stride + position // PAGE_SIZE, mask=is_held, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        kv_at = slot[:, None] * kv_slot_stride + kv_head * kv_head_stride + element[None, :]
        is_kv = is_held[:, None] & in_head[None, :]
        key = tl.load(keys + kv_at, mask=is_kv, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(position[None, :] <= (start + token)[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row may see nothing yet: of a block's padding, or in a tile of a split behind it.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(maximum - base)
        total = total * faded + tl.sum(weights, 1)
        value = tl.load(values + kv_at, mask=is_kv, other=0.0)
        summed = summed * faded[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = new_maximum

    if NUM_SPLITS == 1:
        out_at = (offset + token).to(tl.int64)[:, None] * out_token_stride + head[:, None] * HEAD_DIM
        attended = summed / total[:, None]
        tl.store(out + out_at + element[None, :], attended.to(out.dtype.element_ty), mask=is_query)
    else:
        part = (block * tl.num_programs(1) * GROUP + head) * NUM_SPLITS + split
        tl.store(part_sums + part.to(tl.int64)[:, None] * BLOCK_D + element[None, :], summed, mask=is_row[:, None])
        tl.store(part_maxima + part, maximum, mask=is_row)
        tl.store(part_totals + part, total, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def combine_splits(  # type: ignore[no-untyped-def]
    part_sums,
    part_maxima,
    part_totals,
    out,
    block_sequences,
    query_offsets,
    out_token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Grid: (num_blocks, num_heads). The blocks have one token each."""
    block, head = tl.program_id(0), tl.program_id(1)
    offset = tl.load(query_offsets + tl.load(block_sequences + block))
    split = tl.arange(0, NUM_SPLITS)
    element = tl.arange(0, BLOCK_D)
    part = (block * tl.num_programs(1) + head) * NUM_SPLITS + split
    maxima = tl.load(part_maxima + part)
    factors = tl.exp2(maxima - tl.max(maxima, 0))
    total = tl.sum(tl.load(part_totals + part) * factors, 0)
    sums = tl.load(part_sums + part.to(tl.int64)[:, None] * BLOCK_D + element[None, :])
    attended = tl.sum(sums * factors[:, None], 0) / total
    out_at = offset.to(tl.int64) * out_token_stride + head * HEAD_DIM
    tl.store(out + out_at + element, attended.to(out.dtype.element_ty), mask=element < HEAD_DIM)
