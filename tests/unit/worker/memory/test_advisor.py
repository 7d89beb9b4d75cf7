from __future__ import annotations

import pytest

from worker.memory.advisor import _TABLE, MORE_KV, Bound, Shortage, Stage, advise, format_bytes

GIB = 1 << 30

FEWER = ["Lower --max-running-requests", "lower --mem-fraction-static"]
SMALLER_MODEL = ["--device-memory", "smaller model", "quantized"]
SITUATIONS = [
    # stage, bound, setting to change, words that help, words that would point the wrong way
    (Stage.LOAD, None, "device_memory", SMALLER_MODEL, ["fraction", "chunk", "running"]),
    (
        Stage.LOAD,
        Bound.ALLOCATION,
        "device_memory",
        [*SMALLER_MODEL, "End what else"],
        ["fraction", "chunk", "running"],
    ),
    (Stage.START, Bound.FRACTION, "mem_fraction_static", ["Raise --mem-fraction-static to 0.95"], ["ower", "chunk"]),
    (Stage.START, Bound.ACTIVATIONS, "chunked_prefill_size", ["Lower --chunked-prefill-size"], ["Raise", "fraction"]),
    (Stage.START, Bound.GRAPHS, "cuda_graphs", ["Use --no-cuda-graphs"], ["aise", "fraction", "chunk"]),
    (Stage.START, Bound.CAP, "max_total_tokens", ["Raise --max-total-tokens to 0.95"], ["ower", "fraction"]),
    (Stage.START, Bound.DEVICE, "device_memory", ["--device-memory", "smaller model"], ["fraction", "chunk"]),
    (
        Stage.START,
        Bound.LARGEST_STEP,
        "chunked_prefill_size",
        ["Lower --chunked-prefill-size, then --max-running-requests"],
        ["aise", "fraction"],
    ),
    (
        Stage.START,
        Bound.ALLOCATION,
        "mem_fraction_static",
        ["End what else", "lower --mem-fraction-static"],
        ["aise", "chunk", "running-requests"],
    ),
    (
        Stage.PREFILL,
        None,
        "chunked_prefill_size",
        ["Lower --chunked-prefill-size", "lower --mem-fraction-static"],
        ["aise", "running-requests"],
    ),
    (Stage.DECODE, None, "max_running_requests", FEWER, ["aise", "chunk"]),
    (Stage.SAMPLING, None, "max_running_requests", [*FEWER, "vocabulary"], ["aise", "chunk"]),
    (
        Stage.KV_FULL,
        None,
        "max_running_requests",
        ["fewer", "--max-running-requests", "a larger --mem-fraction-static"],
        ["chunk", "ower ", "--max-total-tokens"],
    ),
    (
        Stage.KV_FULL,
        Bound.ONE_REQUEST,
        "max_new_tokens",
        ["max_new_tokens", "a larger --mem-fraction-static"],
        ["chunk", "running-requests", "--max-total-tokens"],
    ),
]


@pytest.mark.parametrize(("stage", "bound", "setting", "helps", "misleads"), SITUATIONS)
def test_points_the_right_way_and_never_the_wrong_one(
    stage: Stage, bound: Bound | None, setting: str, helps: list[str], misleads: list[str]
) -> None:
    """Behaviour 62: the stage is named and the advice points the right way."""
    advice = advise(stage, Shortage(3 * GIB, GIB // 2, bound, enough="0.95"))
    assert advice.setting == setting
    numbers = ["3,221,225,472 tokens", "536,870,912 tokens"] if stage is Stage.KV_FULL else ["3.00 GiB", "512.00 MiB"]
    for words in helps + numbers:
        assert words in advice.text
    for words in misleads:
        assert words not in advice.text
    assert not set("{}") & set(advice.text)


@pytest.mark.parametrize("bound", [None, Bound.ONE_REQUEST])
@pytest.mark.parametrize("kv_bound", list(MORE_KV))
def test_a_full_pool_names_the_setting_that_bounds_it_and_no_other(bound: Bound | None, kv_bound: Bound) -> None:
    """Behaviour 62: where max_total_tokens caps the pool, a larger share changes nothing."""
    text = advise(Stage.KV_FULL, Shortage(300, 200, bound, kv_bound=kv_bound)).text
    grow = {
        Bound.FRACTION: "larger --mem-fraction-static",
        Bound.ACTIVATIONS: "smaller --chunked-prefill-size",
        Bound.CAP: "larger --max-total-tokens",
    }
    assert [words in text for words in grow.values()] == [each is kv_bound for each in grow]


def test_every_row_is_tested_and_every_stage_has_one() -> None:
    covered = {(stage, bound) for stage, bound, *_ in SITUATIONS}
    assert covered == set(_TABLE)
    assert {stage for stage, _ in covered} == set(Stage)
    assert {bound for _, bound in covered} == {None, *Bound}


def test_without_a_number_that_would_do_none_is_invented() -> None:
    text = advise(Stage.START, Shortage(3 * GIB, GIB, Bound.FRACTION)).text
    assert "Raise --mem-fraction-static:" in text


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE, Stage.SAMPLING])
def test_without_numbers_the_advice_is_the_same(stage: Stage) -> None:
    """An allocator does not always say how much it was asked for."""
    known, unknown = advise(stage, Shortage(3 * GIB, GIB)), advise(stage, Shortage(None, None))
    assert unknown.setting == known.setting
    assert unknown.text == known.text.replace(": it asked for 3.00 GiB and 1.00 GiB were free", "")
    assert "an unknown amount were free" in advise(stage, Shortage(3 * GIB, None)).text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (269 * 10**6, "256.54 MiB"),
        (139 * GIB, "139.00 GiB"),
        (5000 << 40, "5000.00 TiB"),
    ],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
