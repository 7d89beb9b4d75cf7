from __future__ import annotations

import pytest

from radixfleet.sampling import sampling_params
from radixfleet.v1 import inference_pb2
from router.dialects.http_words import kind_of, sampling_fields
from router.dialects.needs import WORDS, needs
from router.dialects.words import SglangWords, VllmWords


def asking(**sampling: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]


ALL = {
    "sampling.seed": asking(seed=1),
    "sampling.n": asking(n=2),
    "sampling.top_k": asking(top_k=3),
    "sampling.min_p": asking(min_p=0.1),
    "sampling.repetition_penalty": asking(repetition_penalty=1.1),
    "sampling.min_new_tokens": asking(min_new_tokens=1),
    "sampling.stop_token_ids": asking(stop_token_ids=[3]),
    "sampling.ignore_eos": asking(ignore_eos=True),
    "sampling.skip_special_tokens": asking(skip_special_tokens=False),
    "sampling.logprobs": asking(logprobs=0),
    "sampling.prompt_logprobs": asking(prompt_logprobs=0),
    "sampling.grammar.regex": asking(grammar=inference_pb2.Grammar(regex="a")),
    "sampling.grammar.lark": asking(grammar=inference_pb2.Grammar(lark='start: "a"')),
    "cache_salt": inference_pb2.GenerateRequest(cache_salt="x"),
    "generated": inference_pb2.GenerateRequest(generated=inference_pb2.TokenIds(ids=[1])),
}


WITH_JSON = asking(grammar=inference_pb2.Grammar(lark='start: "a" b\nb: %json {}'))


@pytest.mark.parametrize("name", ALL)
def test_each_need_is_seen(name: str) -> None:
    assert needs(ALL[name]) == {name}


def test_every_word_can_be_asked_for() -> None:
    assert needs(WITH_JSON) == {"sampling.grammar.lark", "sampling.grammar.lark.json"}
    assert ALL.keys() | needs(WITH_JSON) | {"resume"} == WORDS.keys()
    assert needs(asking(), resumable=True) == {"resume"}


def test_defaults_are_no_needs() -> None:
    plain = asking(
        n=1, top_k=-1, min_p=0.0, repetition_penalty=1.0, min_new_tokens=0, ignore_eos=False, skip_special_tokens=True
    )
    assert not needs(plain)
    assert not needs(asking(grammar=inference_pb2.Grammar(json_object=True)))


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp", "library", ""])
@pytest.mark.parametrize("name", sorted(name for name in ALL if name.startswith("sampling.")))
def test_what_a_kind_knows_is_in_what_it_is_sent(owner: str, name: str) -> None:
    """What it does not know is not sent: the request goes elsewhere, or is refused."""
    kind = kind_of(owner)
    if name in kind.lacks:
        return
    bare = sampling_fields(kind, sampling_params(inference_pb2.SamplingParams(max_new_tokens=9)), is_chat=False)
    request = ALL[name]
    request.sampling.max_new_tokens = 9
    assert sampling_fields(kind, sampling_params(request.sampling), is_chat=False) != bare


def test_what_engines_lack_has_words_for_the_client() -> None:
    for lacks in (SglangWords.lacks, VllmWords.lacks, *(kind_of(owner).lacks for owner in ("vllm", "sglang", "x"))):
        assert lacks <= WORDS.keys()
