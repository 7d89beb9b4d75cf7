from __future__ import annotations

import pytest

from worker.memory.advisor import Bound, Shortage, Stage, advise, format_bytes

GIB = 1 << 30

SITUATIONS = [
    # stage, bound, setting to change, flags that help, words that would point the wrong way
    (Stage.LOAD, None, "device_memory", ["--device-memory", "smaller model", "quantized"], ["fraction", "chunk"]),
    (Stage.START, Bound.FRACTION, "mem_fraction_static", ["Raise --mem-fraction-static to 0.95"], ["Lower", "chunk"]),
    (Stage.START, Bound.ACTIVATIONS, "chunked_prefill_size", ["Lower --chunked-prefill-size"], ["Raise", "fraction"]),
    (Stage.START, Bound.CAP, "max_total_tokens", ["Raise --max-total-tokens to 0.95"], ["Lower", "fraction"]),
    (Stage.START, Bound.DEVICE, "device_memory", ["--device-memory", "smaller model"], ["fraction", "chunk"]),
    (
        Stage.PREFILL,
        None,
        "chunked_prefill_size",
        ["Lower --chunked-prefill-size", "lower --mem-fraction-static"],
        ["raise", "Raise", "running-requests"],
    ),
    (
        Stage.DECODE,
        None,
        "max_running_requests",
        ["Lower --max-running-requests", "lower --mem-fraction-static"],
        ["raise", "Raise", "chunk"],
    ),
    (Stage.KV_FULL, None, "max_running_requests", ["fewer", "--max-running-requests", "more"], ["chunk", "lower"]),
]


@pytest.mark.parametrize(("stage", "bound", "setting", "helps", "misleads"), SITUATIONS)
def test_points_the_right_way_and_never_the_wrong_one(
    stage: Stage, bound: Bound | None, setting: str, helps: list[str], misleads: list[str]
) -> None:
    """Behaviour 62: the stage is named and the advice points the right way."""
    advice = advise(stage, Shortage(3 * GIB, GIB // 2, bound, enough="0.95"))
    assert advice.setting == setting
    assert "3.00 GiB" in advice.text
    assert "512.00 MiB" in advice.text
    for words in helps:
        assert words in advice.text
    for words in misleads:
        assert words not in advice.text


def test_every_stage_and_bound_has_advice() -> None:
    covered = {(stage, bound) for stage, bound, *_ in SITUATIONS}
    assert {stage for stage, _ in covered} == set(Stage)
    assert {bound for stage, bound in covered if stage is Stage.START} == set(Bound)


def test_without_a_number_that_would_do_none_is_invented() -> None:
    text = advise(Stage.START, Shortage(3 * GIB, GIB, Bound.FRACTION)).text
    assert "Raise --mem-fraction-static:" in text


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
