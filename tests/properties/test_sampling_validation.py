"""Whatever a client sends as sampling parameters is either refused by name or lies within the documented bounds."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from radixfleet.convert import sampling_params, sampling_to_pb
from radixfleet.errors import InvalidRequest
from radixfleet.v1 import inference_pb2

floats = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1, 2)
counts = st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 20)
requests = st.builds(
    inference_pb2.SamplingParams,
    temperature=floats,
    top_p=floats,
    top_k=st.none() | st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3),
    min_p=floats,
    seed=counts,
    max_new_tokens=counts,
    min_new_tokens=counts,
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=20),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 5), max_size=5),
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
        name = error.field.removeprefix("sampling.").split("[")[0]
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
    assert sampling_params(sampling_to_pb(sampling), vocab_size=1000) == sampling
