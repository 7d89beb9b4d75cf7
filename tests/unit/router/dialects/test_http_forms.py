"""What is sent over OpenAI's HTTP of an answer that was begun elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixfleet.convert import pack_tokens
from radixfleet.sampling import sampling_params
from radixfleet.v1 import inference_pb2
from router.dialects.http_forms import HttpForms
from router.dialects.http_words import kind_of


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        ({"max_new_tokens": 10}, {"max_tokens": 7}),
        ({"max_new_tokens": 10, "min_new_tokens": 9}, {"max_tokens": 7, "min_tokens": 6}),
        ({"max_new_tokens": 10, "min_new_tokens": 2}, {"max_tokens": 7}),
        ({"min_new_tokens": 400}, {"max_tokens": 253, "min_tokens": 253}),
    ],
)
def test_what_is_there_counts_towards_both_limits(limits: dict[str, int], sent: dict[str, Any]) -> None:
    """vLLM refuses a least number of tokens that is more than the most."""
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(token_ids=pack_tokens(np.arange(4, dtype=np.uint32))),
        generated=pack_tokens(np.arange(3, dtype=np.uint32)),
        sampling=inference_pb2.SamplingParams(**limits),
    )
    (form,) = HttpForms(kind_of("vllm"), None, takes_ids=True).of(request, sampling_params(request.sampling), None)
    assert form.fields["prompt"] == [0, 1, 2, 3, 0, 1, 2]
    assert {name: form.fields[name] for name in ("max_tokens", "min_tokens") if name in form.fields} == sent
