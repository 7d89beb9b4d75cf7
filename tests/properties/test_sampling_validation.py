"""Whatever a client sends as sampling parameters is either refused by name or lies within the documented bounds."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from radixfleet.errors import InvalidRequest
from radixfleet.sampling import sampling_params
from radixfleet.v1 import inference_pb2
from tests.support.sampling_messages import sampling_to_pb

floats = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1, 2)
counts = st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 20)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
requests = st.builds(
    inference_pb2.SamplingParams,
    temperature=floats,
    top_p=floats,
    top_k=st.none() | st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3),
    min_p=floats,
    seed=counts,
    max_new_tokens=counts,
    min_new_tokens=counts,
    stop=st.lists(text, max_size=20),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 5), max_size=5),
    frequency_penalty=floats,
    presence_penalty=floats,
    repetition_penalty=floats,
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1) | st.integers(0, 5), floats.filter(lambda x: x is not None)),
    logprobs=st.none() | st.integers(0, 2**32 - 1) | st.integers(0, 30),
    prompt_logprobs=st.none() | st.integers(0, 30),
    n=counts,
    grammar=st.none()
    | st.builds(inference_pb2.Grammar, json_schema=text)
    | st.builds(inference_pb2.Grammar, json_object=st.booleans())
    | st.builds(inference_pb2.Grammar, regex=text),
)


@given(requests)
@example(inference_pb2.SamplingParams(temperature=math.nan))
@example(inference_pb2.SamplingParams(top_p=5e-324, min_p=-0.0))
def test_refused_by_name_or_within_bounds(message):
    """Behaviour 34: the one validation that every entry uses lets nothing through."""
    wire = inference_pb2.SamplingParams.FromString(message.SerializeToString())
    try:
        sampling = sampling_params(wire, vocab_size=1000)
    except InvalidRequest as error:
        name = error.field.removeprefix("sampling.").split("[")[0].split(".")[0]
        assert name in inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name
        return
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 <= sampling.top_k < 2**31
    assert sampling.max_new_tokens is None or 1 <= sampling.max_new_tokens < 2**31
    assert sampling.min_new_tokens <= (sampling.max_new_tokens or 2**31 - 1)
    assert all(0 < len(text.encode()) <= 1024 for text in sampling.stop)
    assert len(sampling.stop) <= 16
    assert all(token_id < 1000 for token_id in sampling.stop_token_ids)
    assert -2 <= sampling.frequency_penalty <= 2
    assert -2 <= sampling.presence_penalty <= 2
    assert 0.01 <= sampling.repetition_penalty <= 100
    assert all(token_id < 1000 and abs(value) <= 100 for token_id, value in sampling.logit_bias)
    assert (sampling.logprobs or 0) <= 20
    assert (sampling.prompt_logprobs or 0) <= 20
    assert 1 <= sampling.n <= 64
    assert sampling.grammar is None or (sampling.grammar.kind == "json_object") == (sampling.grammar.source == "")
    assert sampling_params(sampling_to_pb(sampling), vocab_size=1000) == sampling
