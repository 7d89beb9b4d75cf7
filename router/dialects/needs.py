"""What a request asks for that not every engine can do, by the names of the fields in the .proto.

An engine's `lacks` are the names that it has no word for. A request goes to engines that lack nothing it needs, so that
what an answer is like does not depend on where it is made. Our own workers lack nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from radixfleet.v1 import inference_pb2

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "cache_salt": "keep the caches of clients apart (cache_salt; --isolate-clients sets one for each)",
        "resume": "go on with an answer that was begun elsewhere",
        "generated": "go on with an answer that was begun elsewhere",
        "sampling.seed": "take a seed",
        "sampling.n": "give several completions",
        "sampling.top_k": "sample with top_k",
        "sampling.min_p": "sample with min_p",
        "sampling.repetition_penalty": "take a repetition penalty",
        "sampling.min_new_tokens": "keep to a least number of tokens",
        "sampling.stop_token_ids": "stop at token ids",
        "sampling.ignore_eos": "go on past the end-of-sequence token",
        "sampling.skip_special_tokens": "show special tokens",
        "sampling.logprobs": "tell log probabilities by token id",
        "sampling.prompt_logprobs": "tell log probabilities of the prompt",
        "sampling.grammar.regex": "keep to a regular expression",
        "sampling.grammar.lark": "keep to a Lark grammar",
        "sampling.grammar.lark.json": "keep to JSON schemas within a Lark grammar",
    }
)
"""What an engine that lacks it cannot do, in words for the client."""


def needs(request: inference_pb2.GenerateRequest, *, resumable: bool = False) -> frozenset[str]:
    """Of `WORDS`, what this request asks for. `resumable`: another engine may have to go on with its answer."""
    sampling = request.sampling
    asked = {
        "cache_salt": bool(request.cache_salt),
        "resume": resumable,
        "generated": bool(request.generated.packed or request.generated.ids),
        "sampling.seed": sampling.HasField("seed"),
        "sampling.n": sampling.n > 1,
        "sampling.top_k": sampling.top_k > 0,
        "sampling.min_p": sampling.min_p > 0,
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
        "sampling.min_new_tokens": sampling.min_new_tokens > 0,
        "sampling.stop_token_ids": bool(sampling.stop_token_ids),
        "sampling.ignore_eos": sampling.ignore_eos,
        "sampling.skip_special_tokens": sampling.HasField("skip_special_tokens") and not sampling.skip_special_tokens,
        "sampling.logprobs": sampling.HasField("logprobs"),
        "sampling.prompt_logprobs": sampling.HasField("prompt_logprobs"),
        "sampling.grammar.regex": sampling.grammar.HasField("regex"),
        "sampling.grammar.lark": sampling.grammar.HasField("lark"),
        "sampling.grammar.lark.json": "%json" in sampling.grammar.lark,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)
