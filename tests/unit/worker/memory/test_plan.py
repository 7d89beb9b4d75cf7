from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.memory.advisor import Bound
from worker.memory.plan import MemoryDemand, MemoryPlanError, chunked_prefill_size_for, kv_bound_of, plan_memory

MIB = 1 << 20
GIB = 1 << 30

DEMAND = MemoryDemand(
    device="cpu",
    total_bytes=8 * GIB,
    weights_bytes=3 * GIB,
    activation_peak_bytes=256 * MIB,
    kv_bytes_per_token=23_040,
    page_size=16,
)


def demand(**changes: object) -> MemoryDemand:
    return dataclasses.replace(DEMAND, **changes)  # type: ignore[arg-type]


def test_kv_gets_its_share_of_what_the_weights_leave() -> None:
    plan = plan_memory(DEMAND)
    page_bytes = 16 * 23_040
    assert plan.num_pages == int(0.9 * 5 * GIB) // page_bytes
    assert plan.kv_bytes == plan.num_pages * page_bytes
    assert plan.kv_tokens == (plan.num_pages - 1) * 16
    assert plan.weights_bytes + plan.kv_bytes + plan.activations_bytes == plan.total_bytes
    assert plan.bounded_by == "mem_fraction_static = 0.9"


def test_kv_leaves_room_for_the_measured_activation_peak() -> None:
    plan = plan_memory(demand(activation_peak_bytes=GIB))
    assert plan.activations_bytes >= GIB
    assert plan.kv_bytes > 4 * GIB - 16 * 23_040
    assert plan.bounded_by == "the activation peak of 1.00 GiB (chunked_prefill_size)"


def test_kv_leaves_room_for_what_recorded_steps_keep() -> None:
    """Behaviour 62: recording comes last, and would find the device full."""
    plan = plan_memory(demand(activation_peak_bytes=GIB, graphs_bytes=300 * MIB))
    assert plan.activations_bytes >= GIB + 300 * MIB
    assert plan.kv_bytes > 4 * GIB - 300 * MIB - 16 * 23_040
    assert plan.bounded_by == ("the activation peak of 1.00 GiB (chunked_prefill_size), and CUDA graphs of 300.00 MiB")
    assert kv_bound_of(plan.pools()) is Bound.ACTIVATIONS
    assert plan.table()[2][3] == "measured peak 1.00 GiB, CUDA graphs 300.00 MiB"
    assert plan.kv_limits[1].reason.endswith("measured activation peak of 1.00 GiB and CUDA graphs of 300.00 MiB")


def test_graphs_that_leave_no_room_for_a_request_are_named() -> None:
    """Behaviour 62: what gives way is what the worker can do without."""
    tight: dict[str, object] = {"total_bytes": 3 * GIB + 600 * MIB, "min_context_tokens": 10_000}
    setting, text = failing(graphs_bytes=200 * MIB, **tight)
    assert setting == "cuda_graphs"
    assert "without the graphs it fits" in text
    plan_memory(demand(**tight))
    assert failing(graphs_bytes=200 * MIB, activation_peak_bytes=500 * MIB, **tight)[0] == "chunked_prefill_size"


def test_kv_can_be_capped_in_tokens() -> None:
    plan = plan_memory(demand(max_total_tokens=1000))
    assert plan.kv_tokens == 1008
    assert plan.num_pages == 64
    assert plan.bounded_by == "max_total_tokens = 1000"


def test_a_cap_that_does_not_bind_is_not_named() -> None:
    assert plan_memory(demand(max_total_tokens=10**9)).bounded_by == "mem_fraction_static = 0.9"


def test_the_table_and_the_pools_tell_the_same() -> None:
    plan = plan_memory(DEMAND)
    pools = plan.pools()
    assert (pools.weights_bytes, pools.kv_bytes, pools.activations_bytes) == (
        plan.weights_bytes,
        plan.kv_bytes,
        plan.activations_bytes,
    )
    assert (pools.device, pools.total_bytes, pools.bounded_by) == ("cpu", 8 * GIB, plan.bounded_by)
    rows = plan.table()
    assert [row[0] for row in rows] == ["weights", "KV cache", "activations", "total"]
    assert rows[0][1:3] == ("3.00 GiB", "37.5 %")
    assert rows[1][3] == f"{plan.kv_tokens:,} tokens in pages of 16"
    assert rows[2][3] == "measured peak 256.00 MiB"
    assert rows[3] == ("total", "8.00 GiB", "100.0 %", "cpu")


def test_weights_that_do_not_fit_ask_for_more_memory_or_a_smaller_model() -> None:
    """Behaviour 62: a device too small for the weights is never answered with a share or a chunk."""
    for total in (2 * GIB, 3 * GIB):
        with pytest.raises(MemoryPlanError) as caught:
            plan_memory(demand(total_bytes=total))
        text = str(caught.value)
        assert caught.value.advice.setting == "device_memory"
        assert "3.00 GiB" in text
        assert "smaller model" in text
        assert "mem-fraction" not in text
        assert "chunk" not in text


def failing(**changes: object) -> tuple[str, str]:
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(demand(**changes))
    return caught.value.advice.setting, str(caught.value)


def test_a_share_too_small_is_to_be_raised_to_what_would_do() -> None:
    """Behaviour 62: the number advised works."""
    setting, text = failing(mem_fraction_static=0.1, min_context_tokens=100_000)
    assert setting == "mem_fraction_static"
    assert "to 0.43 or more" in text
    assert plan_memory(demand(mem_fraction_static=0.43, min_context_tokens=100_000)).kv_tokens >= 100_000


def test_activations_too_large_ask_for_a_smaller_chunk() -> None:
    """Behaviour 62: where the activations are in the way, a larger share would make it worse."""
    setting, text = failing(activation_peak_bytes=5 * GIB)
    assert setting == "chunked_prefill_size"
    assert "mem-fraction" not in text
    assert "leave 0 B" in text


def test_a_cap_too_small_is_to_be_raised() -> None:
    setting, text = failing(max_total_tokens=1000, min_context_tokens=4096)
    assert setting == "max_total_tokens"
    assert "to 4096 or more" in text
    plan_memory(demand(max_total_tokens=4096, min_context_tokens=4096))


def test_a_device_too_small_for_one_request_is_to_be_larger() -> None:
    setting, text = failing(total_bytes=3 * GIB + MIB, activation_peak_bytes=0, min_context_tokens=4096)
    assert setting == "device_memory"
    assert "leave 1.00 MiB" in text
    assert failing(total_bytes=3 * GIB + 1)[0] == "device_memory"


def test_the_padding_page_is_no_room_for_a_request() -> None:
    assert plan_memory(demand(max_total_tokens=16, min_context_tokens=16)).num_pages == 2
    assert failing(max_total_tokens=16, min_context_tokens=17)[0] == "max_total_tokens"


def test_a_share_that_the_setting_does_not_take_is_not_advised() -> None:
    changes = {"total_bytes": 10_000, "weights_bytes": 0, "activation_peak_bytes": 0, "kv_bytes_per_token": 1}
    assert failing(page_size=1, min_context_tokens=9_985, **changes)[0] == "mem_fraction_static"
    assert failing(page_size=1, min_context_tokens=9_994, **changes)[0] == "device_memory"


@pytest.mark.parametrize(
    "changes",
    [
        {"mem_fraction_static": 0.0},
        {"mem_fraction_static": 1.0},
        {"mem_fraction_static": float("nan")},
        {"page_size": 0},
        {"kv_bytes_per_token": 0},
        {"min_context_tokens": 0},
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"mem_fraction_static|at least 1"):
        plan_memory(demand(**changes))


@pytest.mark.parametrize(
    ("device_bytes", "chunk"),
    [
        (8 * GIB, 2048),
        (20 * GIB - 1, 2048),
        (20 * GIB, 4096),
        (60 * GIB - 1, 4096),
        (60 * GIB, 8192),
        (160 * GIB - 1, 8192),
        (160 * GIB, 16384),
    ],
)
def test_the_chunk_follows_the_device(device_bytes: int, chunk: int) -> None:
    assert chunked_prefill_size_for(device_bytes, on_cpu=False) == chunk


@pytest.mark.parametrize("device_bytes", [GIB, 1000 * GIB])
def test_chunks_on_a_cpu_are_small_however_much_memory_it_has(device_bytes: int) -> None:
    assert chunked_prefill_size_for(device_bytes, on_cpu=True) == 1024


demands = st.builds(
    MemoryDemand,
    device=st.just("cpu"),
    total_bytes=st.integers(1, 1 << 20),
    weights_bytes=st.integers(0, 1 << 20),
    activation_peak_bytes=st.integers(0, 1 << 19),
    kv_bytes_per_token=st.integers(1, 600),
    page_size=st.sampled_from([1, 2, 16, 64]),
    mem_fraction_static=st.floats(0.001, 0.999),
    max_total_tokens=st.none() | st.integers(1, 5000),
    min_context_tokens=st.none() | st.integers(1, 5000),
)


@settings(max_examples=500)
@given(demands)
def test_every_plan_keeps_its_promises_and_every_advice_helps(wanted: MemoryDemand) -> None:
    """Behaviour 62: following the advice, with the number it gives, removes that obstacle."""
    try:
        plan = plan_memory(wanted)
    except MemoryPlanError as error:
        setting = error.advice.setting
        if setting == "mem_fraction_static":
            share = float(str(error).split("--mem-fraction-static to ")[1].split()[0])
            assert wanted.mem_fraction_static < share < 1
            assert _next_obstacle(dataclasses.replace(wanted, mem_fraction_static=share)) != setting
        elif setting == "max_total_tokens":
            tokens = int(str(error).split("--max-total-tokens to ")[1].split()[0])
            assert _next_obstacle(dataclasses.replace(wanted, max_total_tokens=tokens)) != setting
        elif setting == "chunked_prefill_size":
            assert _next_obstacle(dataclasses.replace(wanted, activation_peak_bytes=0)) != setting
        else:
            assert setting == "device_memory"
            larger = dataclasses.replace(wanted, total_bytes=1 << 40, mem_fraction_static=0.9)
            assert _next_obstacle(larger) in (None, "max_total_tokens")
        return
    assert plan.weights_bytes + plan.kv_bytes + plan.activations_bytes == plan.total_bytes
    assert plan.activations_bytes >= wanted.activation_peak_bytes
    assert plan.kv_bytes <= wanted.mem_fraction_static * (wanted.total_bytes - wanted.weights_bytes)
    assert plan.kv_tokens >= (wanted.min_context_tokens or min(128, wanted.max_total_tokens or 128))
    if wanted.max_total_tokens is not None:
        assert plan.kv_tokens < wanted.max_total_tokens + wanted.page_size


def _next_obstacle(wanted: MemoryDemand) -> str | None:
    try:
        plan_memory(wanted)
    except MemoryPlanError as error:
        return error.advice.setting
    return None


def test_every_bound_is_reached() -> None:
    bounds = [
        plan_memory(DEMAND).bounded_by,
        plan_memory(demand(activation_peak_bytes=GIB)).bounded_by,
        plan_memory(demand(max_total_tokens=1000)).bounded_by,
    ]
    for bound, words in zip((Bound.FRACTION, Bound.ACTIVATIONS, Bound.CAP), bounds, strict=True):
        assert bound.value in words


class TestTheLeastPool:
    """What nobody can use is refused at start, and not found out by the first request."""

    PAGE = 16 * DEMAND.kv_bytes_per_token

    def test_a_pool_of_a_page_or_two_is_an_error_that_says_what_to_do(self) -> None:
        """Behaviour 62: a device cut too small."""
        remaining = 3 * self.PAGE
        total_bytes = DEMAND.weights_bytes + remaining
        setting, text = failing(total_bytes=total_bytes, activation_peak_bytes=0)
        assert setting == "device_memory"
        assert "--device-memory" in text

    def test_a_share_that_leaves_a_page_is_to_be_raised(self) -> None:
        setting, text = failing(mem_fraction_static=2.5 * self.PAGE / (DEMAND.total_bytes - DEMAND.weights_bytes))
        assert setting == "mem_fraction_static"
        share = float(text.split("--mem-fraction-static to ")[1].split()[0])
        assert plan_memory(demand(mem_fraction_static=share)).kv_tokens >= 128

    @pytest.mark.parametrize("asked", [{"max_total_tokens": 32}, {"min_context_tokens": 32, "max_total_tokens": 48}])
    def test_who_asks_for_a_small_one_gets_it(self, asked: dict[str, int]) -> None:
        assert 32 <= plan_memory(demand(**asked)).kv_tokens <= 48


def test_the_bound_can_be_told_from_its_words() -> None:
    plans = {
        Bound.FRACTION: demand(),
        Bound.ACTIVATIONS: demand(activation_peak_bytes=GIB),
        Bound.CAP: demand(max_total_tokens=1000),
    }
    assert {bound: kv_bound_of(plan_memory(wanted).pools()) for bound, wanted in plans.items()} == {
        bound: bound for bound in plans
    }
