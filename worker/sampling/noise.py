"""Noise without state: a number for each (seed, position, token), the same on every device.

Drawing a token is then choosing the largest of  score + noise  (Gumbel, 1954; the "Gumbel-max trick"): exact, as the
noise of a token is minus the logarithm of an exponentially distributed number. Why not to invert the distribution
function by one number a row: there, a change in the last bits of one logit moves the boundaries of all tokens behind
it, and the draw may land on a token that has nothing to do with it. Here a small change flips a draw only between two
tokens that were nearly tied, which is as rarely as can be. So the same request, computed in another batch or by
another kernel, goes on with the same tokens for far longer.

    stream(seed, position)      64 bits, well mixed, on the host (`counter_random`)
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

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_31_BITS = 0x7FFFFFFF
_BELOW_ONE = 1 - 2.0**-24
"""The largest float32 below 1: no number is infinite, so that a token which is alone is drawn whatever its noise."""


def noise(rows: Tensor, vocab_size: int) -> Tensor:
    """Float32 [n, vocab_size], distributed as Gumbel's, of the streams `rows` int32 [n, 2] on their device."""
    hashed = torch.arange(vocab_size, dtype=torch.int32, device=rows.device) ^ rows[:, :1]
    _fold(hashed, 16)
    hashed *= _FIRST  # the multipliers and shifts of Wellons' lowbias32, the second half of the key between them
    hashed ^= rows[:, 1:]
    _fold(hashed, 15)
    hashed *= _SECOND - (1 << 32)
    _fold(hashed, 16)
    hashed &= _31_BITS
    uniform = hashed.float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def hashes(rows: npt.NDArray[np.uint32], tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """On the host, what `noise` makes its noise of: 31 bits for `tokens` ([vocab] or [n, 1]) in each of `rows`."""
    hashed = tokens ^ rows[:, :1]
    folded = hashed >> 16
    hashed ^= folded
    hashed *= np.uint32(_FIRST)
    hashed ^= rows[:, 1:]
    hashed ^= np.right_shift(hashed, 15, out=folded)
    hashed *= np.uint32(_SECOND)
    hashed ^= np.right_shift(hashed, 16, out=folded)
    hashed &= np.uint32(_31_BITS)
    return hashed


def gumbel(hashed: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """On the host, the noise that belongs to `hashes`: that of `noise`, but for the rounding of its logarithms."""
    uniform = np.minimum((hashed.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31), np.float32(_BELOW_ONE))
    noise_of: npt.NDArray[np.float64] = -np.log(-np.log1p(-uniform.astype(np.float64)))
    return noise_of


def _fold(x: Tensor, bits: int) -> None:
    """x ^= x >> bits, without the sign, in place."""
    x ^= (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
