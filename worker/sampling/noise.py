"""Noise without state: a number for each (seed, position, token), the same on every device.

Drawing a token is then choosing the largest of  score + noise  (Gumbel, 1954; the "Gumbel-max trick"): exact, as the
noise of a token is minus the logarithm of an exponentially distributed number. Why not to invert the distribution
function by one number a row: there, a change in the last bits of one logit moves the boundaries of all tokens behind
it, and the draw may land on a token that has nothing to do with it. Here a small change flips a draw only between two
tokens that were nearly tied, which is as rarely as can be. So the same request, computed in another batch or by
another kernel, goes on with the same tokens for far longer.

    streams(seed, position)     64 bits, well mixed, on the host
    hash(token)                 token and the stream's halves, mixed in 32-bit integers: products wrap alike everywhere
    noise(token)                -log(-log(1 - u)), u = (hash's 31 bits + 1/2) / 2^31

A row's noise depends neither on the other rows of its batch nor on how often anything was drawn before: a request gives
the same tokens alone and in a batch, after a retraction, and when another worker resumes it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.sampling.counter_random import stream_bits

_31_BITS = 0x7FFFFFFF
_BELOW_ONE = 1 - 2.0**-24
"""The largest float32 below 1: no number is infinite, so that a token which is alone is drawn whatever its noise."""


def streams(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 [n, 2]: what `noise` needs of n rows."""
    return stream_bits(seeds, positions).view(np.int32).reshape(-1, 2)


def noise(rows: Tensor, vocab_size: int) -> Tensor:
    """Float32 [n, vocab_size], distributed as Gumbel's, of the streams `rows` int32 [n, 2] on their device."""
    hashed = torch.arange(vocab_size, dtype=torch.int32, device=rows.device) ^ rows[:, :1]
    _fold(hashed, 16)
    hashed *= 0x7FEB352D  # the multipliers and shifts of Wellons' lowbias32, the second half of the key between them
    hashed ^= rows[:, 1:]
    _fold(hashed, 15)
    hashed *= 0x846CA68B - (1 << 32)
    _fold(hashed, 16)
    hashed &= _31_BITS
    uniform = hashed.float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _fold(x: Tensor, bits: int) -> None:
    """x ^= x >> bits, without the sign, in place."""
    x ^= (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
