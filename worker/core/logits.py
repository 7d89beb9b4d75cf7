"""What a request asks to be done to its logits and to be told of them, and what it is told. Plain data."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from radixfleet.types import Grammar
from worker.core.arrays import Float32Array, Int32Array


class LogitEdits(msgspec.Struct, frozen=True, array_like=True):
    """Changes to a row's logits before a token is chosen, in this order: penalties, bias, grammar."""

    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it was generated."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each generated token."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it where positive, multiplied where negative: once."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); no id occurs twice."""
    grammar: Grammar | None = None
    """What the answer must be like."""

    @property
    def penalizes(self) -> bool:
        """Whether tokens that came already are treated differently."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """Whether the tokens before the next one matter."""
        return self.penalizes or self.grammar is not None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one token: natural logarithms of the softmax of the model's own logits."""

    logprob: float
    top_ids: list[int]
    """The likeliest tokens in its place, the likeliest first."""
    top_logprobs: list[float]


class StepLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of all tokens of a step that are to be told of: one entry a token, by ascending sequence, then position."""

    sequences: Int32Array
    """Index of the token's sequence in the plan."""
    positions: Int32Array
    """Position of the token itself (not of the one whose logits foretell it): below the prompt's length for tokens of
    the prompt, and the position after the sequence's last for the sampled one."""
    logprobs: Float32Array
    top_ids: Int32Array
    """`width` for each entry: at least as many as its row asked for."""
    top_logprobs: Float32Array
    width: int


class Logprobs(NamedTuple):
    """Log probabilities of n tokens, on the host."""

    tokens: Float32Array
    """[n]"""
    top_ids: Int32Array
    """[n, k], the likeliest first."""
    top: Float32Array
    """[n, k]"""
