"""The `OutputText`s of a request, the same on router and worker."""

from __future__ import annotations

from functools import partial

from radixfleet.output_text.detokenizer import CONTEXT_TOKENS, Detokenizer
from radixfleet.output_text.output import OutputText
from radixfleet.output_text.stop_strings import StopMatcher, StopStrings
from radixfleet.text import Tokenizer
from radixfleet.types import SamplingParams, TokenArray


def texts_of(
    tokenizer: Tokenizer, sampling: SamplingParams, stop_token_ids: frozenset[int], prompt: TokenArray
) -> list[OutputText]:
    """One for each of the n completions. `stop_token_ids`: all that end the generation by themselves."""
    skip = sampling.skip_special_tokens
    decode = partial(tokenizer.decode, skip_special_tokens=skip)
    invisible = tokenizer.special_token_ids if skip else frozenset()
    context = prompt[-CONTEXT_TOKENS:].tolist()
    stops = StopStrings(sampling.stop) if sampling.stop else None
    unseen = {
        token_id: stop for stop in sampling.stop if skip and (token_id := tokenizer.special_token_id(stop)) is not None
    }
    return [
        OutputText(
            Detokenizer(decode, invisible, context=context),
            StopMatcher(stops) if stops is not None else None,
            stop_token_ids,
            unseen,
        )
        for _ in range(sampling.n)
    ]
