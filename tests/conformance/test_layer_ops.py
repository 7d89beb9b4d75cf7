"""The operations between a layer's linear ones: the kernels of Triton and those in plain torch against exact ones."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.memory.kv_pool import TokenToKVPool
from worker.model.layer_ops import HeadNorms, LayerOps, torch_ops

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Of the largest of what is compared: each intermediate result is rounded."""
HEADS = [
    (4, 4, 16),  # as many of keys as of queries
    (6, 2, 64),
    (3, 1, 8),  # groups that are no power of two
    (9, 3, 80),  # halves of a head that are none
    (8, 1, 128),
    (2, 2, 256),
    (40, 8, 32),  # more heads than a program takes
]
"""Heads of queries, of keys, and their elements."""


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


def by_torch() -> LayerOps:
    return torch_ops()


def by_triton() -> LayerOps:
    if platform.system() != "Linux":
        pytest.skip("Triton is for Linux")
    from worker.model.fused_ops import FUSED

    return FUSED


@pytest.fixture(params=[by_torch, by_triton])
def ops(request: pytest.FixtureRequest) -> LayerOps:
    return request.param()  # type: ignore[no-any-return]


def numbers(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert ours.shape == exact.shape
    if ours.numel():
        difference = (ours.double() - exact).abs().max() / exact.abs().max()
        assert difference < TOLERANCE[dtype]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 63, 64, 576, 4096, 5120])
@pytest.mark.parametrize("has_added", [False, True])
def test_add_and_norm(ops: LayerOps, dtype: torch.dtype, size: int, has_added: bool, device: str) -> None:
    hidden, added = (numbers(5, size, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weight = numbers(size, dtype=dtype, device=device, seed=3)
    exact = hidden.double() + (added.double() if has_added else 0)
    total, norm = ops.add_and_norm(hidden.clone(), added if has_added else None, weight, EPSILON)
    check(total, exact, dtype)
    check(norm, normed(total.double(), weight), dtype)


@dataclass(frozen=True)
class Heads:
    """What `rotate_and_keep` is given, and what it makes of it exactly."""

    heads: Tensor
    factors: tuple[Tensor, Tensor]
    norms: HeadNorms | None
    pool: TokenToKVPool
    slots: Tensor
    queries: Tensor
    """float64, and those below."""
    keys: Tensor
    values: Tensor

    def give_to(self, ops: LayerOps) -> Tensor:
        """The queries. K and V are in the pool."""
        return ops.rotate_and_keep(self.heads, self.factors, self.norms, self.pool.place(1, self.slots))


def make_heads(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    has_norms: bool,
    num_tokens: int = 5,
    page_size: int = 16,
    seed: int = 0,
) -> Heads:
    num_heads, num_kv_heads, head_dim = sizes
    made: dict[str, Any] = {"dtype": dtype, "device": device}
    heads = numbers(num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=seed, **made)
    angles = torch.randn(num_tokens, 1, head_dim // 2, generator=torch.Generator().manual_seed(seed + 1))
    cosine, sine = (torch.cat((part, part), -1).to(device, dtype) for part in (angles.cos(), angles.sin()))
    sine[..., : head_dim // 2].neg_()
    query, key = (1 + 0.3 * numbers(head_dim, seed=seed + 2 + which, **made) for which in range(2))
    num_pages = 2 + -(-num_tokens // page_size)
    pool = TokenToKVPool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device(device),
    )
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(7.0)
    slots = page_size + torch.randperm((num_pages - 1) * page_size, generator=torch.Generator().manual_seed(seed + 4))
    exact = heads.double()
    q, k, v = exact[:, :num_heads], exact[:, num_heads:-num_kv_heads], exact[:, -num_kv_heads:]
    if has_norms:
        q, k = (normed(each, weight).to(dtype).double() for each, weight in ((q, query), (k, key)))

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        cos, sin = cosine[..., head_dim // 2 :].double(), sine[..., head_dim // 2 :].double()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    return Heads(
        heads=heads,
        factors=(cosine, sine),
        norms=HeadNorms(query, key, EPSILON) if has_norms else None,
        pool=pool,
        slots=slots[:num_tokens].to(device),
        queries=turned(q),
        keys=turned(k),
        values=v,
    )


def check_pool(case: Heads, dtype: torch.dtype) -> None:
    keys, values = case.pool.keys[1], case.pool.values[1]
    check(keys[case.slots], case.keys, dtype)
    assert torch.equal(values[case.slots].double(), case.values)
    untouched = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    untouched[case.slots] = False
    assert all((tensor[untouched] == 7).all() for tensor in (keys, values))
    assert all((tensor == 7).all() for tensor in (case.pool.keys[0], case.pool.values[0])), "another layer's"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_and_keep(
    ops: LayerOps, dtype: torch.dtype, sizes: tuple[int, int, int], has_norms: bool, device: str
) -> None:
    case = make_heads(sizes, dtype, device, has_norms=has_norms)
    before = case.heads.clone()
    check(case.give_to(ops), case.queries, dtype)
    check_pool(case, dtype)
    assert torch.equal(case.heads, before)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_keys_go_to_pages_of_any_size(ops: LayerOps, page_size: int, device: str) -> None:
    case = make_heads((6, 2, 16), torch.float32, device, has_norms=True, num_tokens=40, page_size=page_size)
    case.give_to(ops)
    check_pool(case, torch.float32)


def test_padding_of_a_recorded_step_changes_nothing(ops: LayerOps, device: str) -> None:
    """Behaviour 2: rows that are computed twice write the same again."""
    case = make_heads((6, 2, 16), torch.bfloat16, device, has_norms=True, num_tokens=9)
    for tensor in (case.heads, *case.factors, case.slots):
        tensor[6:] = tensor[2:3].clone()
    queries = case.give_to(ops)
    assert torch.equal(queries[6:], queries[2:3].expand(3, -1, -1))
    assert torch.equal(case.pool.values[1][case.slots[6:]], case.heads[2:3, 8:].expand(3, -1, -1))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, as on a GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 80, 1024, 1536])
def test_gate(ops: LayerOps, dtype: torch.dtype, size: int, device: str) -> None:
    gate_up = numbers(5, 2 * size, dtype=dtype, device=device)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -300.0, 30.0, -20.0
    left, right = gate_up.double().chunk(2, -1)
    check(ops.gate(gate_up), functional.silu(left) * right, dtype)


def test_a_batch_of_no_tokens(ops: LayerOps, device: str) -> None:
    nothing = torch.empty((0, 64), device=device)
    total, norm = ops.add_and_norm(nothing, nothing, torch.ones(64, device=device), EPSILON)
    assert total.shape == norm.shape == (0, 64)
    case = make_heads((4, 2, 16), torch.float32, device, has_norms=False, num_tokens=0)
    assert case.give_to(ops).shape == (0, 4, 16)
    check_pool(case, torch.float32)
    assert ops.gate(nothing).shape == (0, 32)


def test_a_nan_stays_in_its_token(ops: LayerOps, device: str) -> None:
    """Behaviour 35: of a row's logits, and so of all that they are made from."""
    case = make_heads((4, 2, 16), torch.float32, device, has_norms=True)
    hidden, gate_up = (numbers(5, 64, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    for tensor in (case.heads, hidden, gate_up):
        tensor[2] = torch.nan
    results = [*ops.add_and_norm(hidden, None, torch.ones(64, device=device), EPSILON), ops.gate(gate_up)]
    results += [case.give_to(ops), case.pool.keys[1][case.slots], case.pool.values[1][case.slots]]
    for result in results:
        assert result.flatten(1).isnan().all(1).tolist() == [False, False, True, False, False]
        assert not result[[0, 1, 3, 4]].isnan().any()


@settings(max_examples=15)
@given(
    num_tokens=st.integers(1, 12),
    sizes=st.sampled_from(HEADS),
    dtype=st.sampled_from(DTYPES),
    has_norms=st.booleans(),
    seed=st.integers(0, 100),
)
def test_a_tokens_bits_do_not_depend_on_its_batch(
    num_tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, has_norms: bool, seed: int
) -> None:
    """Behaviour 30, of the kernels: on a GPU `try_layer_ops` asks the same of them."""
    ops, size, token = by_triton(), 7 * sizes[2], seed % num_tokens
    one = slice(token, token + 1)
    hidden, added = (numbers(num_tokens, size, dtype=dtype, device="cpu", seed=seed + each) for each in range(2))
    weight = numbers(size, dtype=dtype, device="cpu")
    case = make_heads(sizes, dtype, "cpu", has_norms=has_norms, num_tokens=num_tokens, seed=seed)

    def compute(rows: slice) -> list[Tensor]:
        place = case.pool.place(1, case.slots[rows])
        factors = (case.factors[0][rows], case.factors[1][rows])
        queries = ops.rotate_and_keep(case.heads[rows], factors, case.norms, place)
        totals = ops.add_and_norm(hidden[rows].clone(), added[rows], weight, EPSILON)
        kept = [pool[case.slots[rows]] for pool in (place.keys, place.values)]
        return [queries, *totals, *kept, ops.gate(case.heads[rows].flatten(1)[:, : 2 * sizes[2]].contiguous())]

    for together, alone in zip(compute(slice(None)), compute(one), strict=True):
        assert torch.equal(together[one], alone)


@pytest.mark.parametrize("make", [by_torch, by_triton])
def test_slots_beyond_two_to_the_31_elements(make: Callable[[], LayerOps], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pool as large as a GPU's may be: K and V are written where they belong, not where 32 bits wrap to."""
    head_dim = 256
    num_slots = (1 << 31) // head_dim + 64
    pool = KvOfOneLayer(num_slots, head_dim)
    case = make_heads((1, 1, head_dim), torch.float16, "cpu", has_norms=False, num_tokens=2)
    slots = torch.tensor([num_slots - 1, 3])
    make().rotate_and_keep(case.heads, case.factors, None, pool.place(slots))
    check(pool.keys[slots], case.keys, torch.float16)
    assert torch.equal(pool.values[slots].double(), case.values)


class KvOfOneLayer:
    """A pool of some GiB of address space, of which a few pages are touched."""

    def __init__(self, num_slots: int, head_dim: int) -> None:
        self.keys, self.values = (torch.empty((num_slots, 1, head_dim), dtype=torch.float16) for _ in range(2))

    def place(self, slots: Tensor) -> Any:
        from worker.memory.kv_pool import KvPlace

        return KvPlace(self.keys, self.values, slots)
