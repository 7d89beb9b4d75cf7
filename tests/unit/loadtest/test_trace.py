"""Reading traces of Mooncake's form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.trace import Trace, TraceError
from loadtest.workloads import ceiling, reusable_tokens


def entry(timestamp: float, length: int, ids: list[int], output: int = 10, **more: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids} | more


@pytest.fixture
def write(tmp_path: Path):
    def write(*entries: object) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in entries))
        return path

    return write


def test_equal_ids_are_equal_tokens_and_the_last_block_is_cut(write):
    path = write(entry(1000, 1100, [7, 8, 9]), entry(3000, 1024, [7, 8], output=3), entry(4000, 600, [5, 8]))
    first, second, third = Trace(path).arrivals(vocab_size=1000, seed=0)
    assert [len(each.token_ids) for each in (first, second, third)] == [1100, 1024, 600]
    assert first.token_ids[:1024].tolist() == second.token_ids.tolist()
    assert not np.array_equal(third.token_ids[:512], second.token_ids[:512])
    assert (second.max_new_tokens, len(second.answer_ids)) == (3, 3)
    assert reusable_tokens([first, second, third]) == [0, 1023, 0]


def test_times_are_seconds_since_the_first_request_and_speed_divides_them(write):
    path = write(entry(5000, 10, [1]), entry(9000, 10, [2]), entry(6000, 10, [3]))
    assert [each.at_s for each in Trace(path).arrivals(vocab_size=10, seed=0)] == [0.0, 1.0, 4.0]
    assert [each.at_s for each in Trace(path, speed=4.0).arrivals(vocab_size=10, seed=0)] == [0.0, 0.25, 1.0]


def test_a_mean_rate_goes_before_the_speed(write):
    path = write(entry(5000, 10, [1]), entry(9000, 10, [2]), entry(6000, 10, [3]))
    for speed in (1.0, 4.0):
        arrivals = Trace(path, speed, requests_per_s=6.0).arrivals(vocab_size=10, seed=0)
        assert [each.at_s for each in arrivals] == [0.0, 0.125, 0.5]
    at_once = write(entry(7, 10, [1]), entry(7, 10, [2]))
    assert [each.at_s for each in Trace(at_once, requests_per_s=6.0).arrivals(vocab_size=10, seed=0)] == [0.0, 0.0]


def test_answers_are_told_apart_from_each_other_and_from_all_prompts(write):
    path = write(*(entry(index, 512, [index], output=50) for index in range(20)))
    arrivals = Trace(path).arrivals(vocab_size=10_000, seed=0)
    beginnings = {each.token_ids[:8].tobytes() for each in arrivals} | {a.answer_ids[:8].tobytes() for a in arrivals}
    assert len(beginnings) == 40


def test_ids_may_be_any_numbers(write):
    big = 2**62
    path = write(entry(0, 1000, [big, -3]), entry(1, 1000, [big, big + 1]))
    assert ceiling(Trace(path).arrivals(vocab_size=10_000, seed=0)) == pytest.approx(512 / 2000)


def test_blocks_may_have_another_size(write):
    path = write(entry(0, 100, [1, 2]), entry(1, 64, [1]))
    arrivals = Trace(path, id_tokens=64).arrivals(vocab_size=10_000, seed=0)
    assert reusable_tokens(arrivals) == [0, 63]


def test_only_the_first_requests_on_demand_and_fields_that_mean_nothing_are_ignored(write):
    path = write(entry(0, 10, [1], session="a"), "", entry(1, 10, [2]), "this is not read")
    assert len(Trace(path, max_requests=2).arrivals(vocab_size=10, seed=0)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: .*each line must be a JSON object with timestamp"),
        ('{"timestamp": 0, "input_length": 5}', "line 2: .*output_length"),
        (entry(0, 1000, [1]), "line 2: 1 hash_ids for 1000 tokens; there must be 2, one for each 512 tokens"),
        (entry(0, 0, []), r"line 2: Expected `int` >= 1 - at `\$.input_length`"),
        (entry(0, 10, [1], output=0), r"line 2: Expected `int` >= 1 - at `\$.output_length`"),
        (entry(0, 10, [1], output=10**12), r"line 2: Expected `int` <= 16777216 - at `\$.output_length`"),
        (entry(0, 10, ["x"]), "line 2: .*hash_ids"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(write, line: object, message: str):
    path = write(entry(0, 10, [1]), line)
    with pytest.raises(TraceError, match=message):
        Trace(path).arrivals(vocab_size=10, seed=0)


def test_a_file_may_begin_with_a_byte_order_mark_and_end_lines_as_windows_does(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(json.dumps(entry(at, 10, [1])).encode() + b"\r\n" for at in (0, 1)))
    assert len(Trace(path).arrivals(vocab_size=10, seed=0)) == 2


def test_an_empty_trace_is_refused(write):
    with pytest.raises(TraceError, match="holds no requests"):
        Trace(write("")).arrivals(vocab_size=10, seed=0)
