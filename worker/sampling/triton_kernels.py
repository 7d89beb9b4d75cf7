"""The threshold of top_p on a GPU, in one launch. See `worker.sampling.nucleus`, which calls it.

Importing this compiles nothing; TRITON_INTERPRET=1 in the environment, set before triton is imported, has it computed
by Triton's interpreter on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def find_thresholds(  # type: ignore[no-untyped-def]
    scores,  # float32 [n, vocab_size], 0 and below
    shares,  # float64 [n]
    thresholds,  # float32 [n]
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Grid: (n,). One program finds the threshold of one row, so no row depends on another.

    The bits of -score are ordered as tokens are, likeliest first. They are found from the top, two at a time: of the
    four values that two bits can have, the first whose mass (of all tokens up to it) is enough. A pass sums for three
    values; the fourth is enough where none of them is.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    base = scores + row.to(tl.int64) * row_stride
    all_of, upper = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        score = tl.load(base + begin + lane, mask=begin + lane < vocab_size, other=float("-inf"))
        weight = tl.exp(score)
        bits = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        all_of += weight
        upper += tl.where(bits <= 0x3FFFFFFF, weight, 0.0)
    enough = tl.load(shares + row) * tl.sum(all_of.to(tl.float64), 0)
    found = tl.where(tl.sum(upper.to(tl.float64), 0) < enough, 1 << 30, 0)
    for step in range(15):
        shift = 28 - 2 * step
        first = found + (1 << shift) - 1
        second = first + (1 << shift)
        third = second + (1 << shift)
        to_first, to_second = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        to_third = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, vocab_size, BLOCK):
            score = tl.load(base + begin + lane, mask=begin + lane < vocab_size, other=float("-inf"))
            weight = tl.exp(score)
            bits = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            to_first += tl.where(bits <= first, weight, 0.0)
            to_second += tl.where(bits <= second, weight, 0.0)
            to_third += tl.where(bits <= third, weight, 0.0)
        digit = (tl.sum(to_first.to(tl.float64), 0) < enough).to(tl.int32)
        digit += (tl.sum(to_second.to(tl.float64), 0) < enough).to(tl.int32)
        digit += (tl.sum(to_third.to(tl.float64), 0) < enough).to(tl.int32)
        found += digit << shift
    tl.store(thresholds + row, -found.to(tl.float32, bitcast=True))
