"""Every attention backend against attention in its plainest form, on batches as the scheduler makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.paged_batches import PagedCase, make_case, naive_attention
from tests.support.tiny_model import tiny_model
from worker.model.configuration import load_config
from worker.runner.attention.backends import make_attention_backend
from worker.runner.attention.protocol import AttentionBackend, AttentionBatch
from worker.runner.kernels.compiler import find_compiler
from worker.runner.kernels.library import Kernels

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.005}


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


Name = Literal["cpu", "sdpa", "fixed shapes"]
NAMES: tuple[Name, ...] = get_args(Name)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Name:
    return request.param  # type: ignore[no-any-return]


def kernels_for(name: Name, case: PagedCase) -> Kernels | None:
    if name != "cpu":
        return None
    if find_compiler() is None:
        pytest.skip("no C compiler")
    return Kernels(num_threads=2)


def backend_for(name: Name, case: PagedCase) -> AttentionBackend:
    _, num_heads, head_dim = case.q.shape
    shape = replace(
        load_config(tiny_model()),
        num_heads=num_heads,
        num_kv_heads=case.pool.keys[0].shape[1],
        head_dim=head_dim,
    )
    return make_attention_backend(kernels_for(name, case), shape, deterministic=name != "sdpa")


def attended(backend: AttentionBackend, case: PagedCase) -> Tensor:
    backend.plan(case.batch)
    result = backend.attend(case.q, case.pool.keys[0], case.pool.values[0])
    assert result.shape == (case.q.shape[0], case.q.shape[1] * case.q.shape[2])
    assert result.dtype == case.q.dtype
    return result


def check(name: Name, case: PagedCase) -> None:
    difference = attended(backend_for(name, case), case).double().cpu() - naive_attention(case)
    assert difference.abs().max() < TOLERANCE[case.q.dtype]


CASES: dict[str, list[tuple[int, int]]] = {
    "one decode": [(20, 1)],
    "the very first token": [(0, 1)],
    "whole prompts": [(0, 5), (0, 33), (0, 16)],
    "decodes of equal length": [(31, 1)] * 5,
    "decodes of many lengths": [(0, 1), (1, 1), (3, 1), (15, 1), (16, 1), (100, 1), (700, 1), (701, 1)],
    "chunks on a prefix": [(16, 16), (1, 2), (40, 3), (64, 64)],
    "mixed": [(90, 1), (0, 40), (7, 1), (33, 20), (34, 1), (0, 1)],
    "a chunk larger than a tile": [(37, 530), (3, 1)],
    "a prompt larger than a tile": [(0, 530)],
}


@pytest.mark.parametrize("sequences", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batches_as_the_scheduler_makes_them(
    name: Name, sequences: list[tuple[int, int]], dtype: torch.dtype, device: str
) -> None:
    check(name, make_case(sequences, dtype=dtype, device=device))


@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 1, "num_kv_heads": 1},
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 8, "num_kv_heads": 1},
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        {"head_dim": 128},
        {"page_size": 1},
        {"page_size": 64},
    ],
    ids=str,
)
def test_heads_and_pages_of_all_sizes(name: Name, shape: dict[str, Any]) -> None:
    check(name, make_case(CASES["mixed"], **shape))


@settings(max_examples=40, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_random_batches(sequences: list[tuple[int, int]], page_size: int) -> None:
    for name in NAMES:
        check(name, make_case(sequences, page_size=page_size))


def test_many_long_decodes_exceed_what_one_gather_takes(name: Name) -> None:
    case = make_case([(2500 + index, 1) for index in range(40)], num_heads=2, num_kv_heads=1, head_dim=8)
    check(name, case)


def test_a_nan_in_one_sequence_stays_there(name: Name) -> None:
    """Behaviour 35: through attention, for decodes in one group and for chunks."""
    case = make_case([(30, 1), (31, 1), (29, 1), (0, 12), (8, 9)])
    backend = backend_for(name, case)
    clean = attended(backend, case).clone()
    for victim in (1, 4):
        slot = int(case.batch.table[int(case.batch.rows[victim]), 3])
        case.pool.values[0][slot] = torch.nan
        first = int(case.batch.offsets[victim])
        theirs = torch.zeros(len(case.q), dtype=torch.bool)
        theirs[first : first + int(case.batch.lengths[victim])] = True
        result = attended(backend, case)
        assert result[theirs].isnan().any()
        assert torch.equal(result[~theirs], clean[~theirs])
        case.pool.values[0][slot] = 0.5
        clean = attended(backend, case).clone()


def test_a_plan_serves_all_layers_and_is_replaced_by_the_next(name: Name) -> None:
    first, second = make_case(CASES["mixed"], seed=1), make_case(CASES["chunks on a prefix"], seed=2)
    backend = backend_for(name, first)
    once = attended(backend, first).clone()
    again = backend.attend(first.q, first.pool.keys[0], first.pool.values[0])
    assert torch.equal(once, again)
    attended(backend, second)
    assert torch.equal(attended(backend, first), once)


def test_the_plan_does_not_hold_on_to_the_table(name: Name) -> None:
    """The table changes when the next step is prepared, possibly while this one still runs."""
    case = make_case(CASES["mixed"])
    backend = backend_for(name, case)
    expected = naive_attention(case)
    backend.plan(case.batch)
    case.batch.table.zero_()
    result = backend.attend(case.q, case.pool.keys[0], case.pool.values[0])
    np.testing.assert_allclose(result.double(), expected, atol=2e-6)


@pytest.mark.parametrize("name", ["cpu", "fixed shapes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_backends_give_a_token_the_same_bits_in_every_batch(
    name: Name, dtype: torch.dtype, device: str
) -> None:
    """Behaviour 30: a sequence in one chunk, in several, token by token, and beside others."""
    whole = make_case([(0, 200), (37, 90), (150, 1)], dtype=dtype, device=device)
    backend = backend_for(name, whole)
    expected = attended(backend, whole).clone()
    q, table, rows = whole.q, whole.batch.table, whole.batch.rows
    others = [(rows[1], 37, 90), (rows[2], 150, 1)]
    for start, length in [(0, 1), (1, 1), (2, 15), (17, 47), (64, 64), (128, 71), (199, 1), (0, 129), (129, 71)]:
        for beside, q in (([], whole.q[:0]), (others, whole.q[200:])):
            columns = (np.array(column, np.int32) for column in zip((rows[0], start, length), *beside, strict=True))
            own = whole.q[start : start + length]
            part = replace(whole, batch=AttentionBatch(*columns, table), q=torch.cat((own, q)))
            result = attended(backend, part)
            assert torch.equal(result[:length], expected[start : start + length])
            assert torch.equal(result[length:], expected[200 : 200 + len(q)])
