"""What `radixfleet bench fleet` sends, of a trace and of workloads by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.bench.fleet import Demand, Target, UnfitWorkload

TARGET = Target("min_cost", ("w0", "w1"), kv_tokens=10_000, vocab_size=1000, max_context_tokens=4096)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Three requests in two seconds, with an id for each 64 tokens."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * number, "input_length": 100, "output_length": 5, "hash_ids": [0, number + 1]}
        for number in range(3)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_a_trace_is_replayed_as_fast_as_asked(trace: str) -> None:
    def times(**options: float) -> list[float]:
        arrivals = Demand(trace, 10, id_tokens=64, **options).arrivals(TARGET)  # type: ignore[arg-type]
        return [arrival.at_s for arrival in arrivals]

    assert times() == [0.0, 1.0, 2.0]
    assert times(speed=2.0) == [0.0, 0.5, 1.0]
    assert times(rate=3.0) == times(rate=3.0, speed=2.0) == [0.0, 0.5, 1.0]


def test_the_beginning_of_a_trace_and_its_prompts(trace: str) -> None:
    first, second = Demand(trace, 2, id_tokens=64).arrivals(TARGET)
    assert (first.prompt_tokens, first.max_new_tokens) == (100, 5)
    assert first.token_ids[:64].tolist() == second.token_ids[:64].tolist()
    assert first.token_ids[64:].tolist() != second.token_ids[64:].tolist()


def test_what_does_not_fit_the_model_is_refused_with_what_would(trace: str) -> None:
    demand = Demand(trace, 10, lengths=100.0, id_tokens=64)
    with pytest.raises(UnfitWorkload, match=r"3 of 3 requests .* up to 10,500 of 4,096 tokens.*--lengths 37\.1"):
        demand.arrivals(TARGET)
    assert len(Demand(trace, 10, lengths=37.1, id_tokens=64).arrivals(TARGET)) == 3


def test_a_name_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnfitWorkload, match=r"no workload is called 'zip', nor is there such a file; .*zipf"):
        Demand("zip", 10).arrivals(TARGET)
