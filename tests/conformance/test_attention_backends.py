"""Every attention backend against attention in its plainest form, on batches as the scheduler makes them."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.fake_flash import FakeFlash
from tests.support.paged_batches import PagedCase, make_case, naive_attention
from tests.support.tiny_model import tiny_model
from worker.model.configuration import load_config
from worker.runner.attention import backends, flash
from worker.runner.attention.backends import AttentionNeeds, make_attention_backend
from worker.runner.attention.flash import FlashBackend, FlashUnavailable, find_flash, refuse_where_flash_fails
from worker.runner.attention.protocol import AttentionBackend, AttentionBatch, RecordableAttention
from worker.runner.attention.trial import DeviceLost, TrialFailed
from worker.runner.devices import DeviceError
from worker.runner.kernels.compiler import find_compiler
from worker.runner.kernels.library import Kernels

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.005}
GPU_TOLERANCE = TOLERANCE | {torch.float32: 2e-5}
"""Exponentials are approximated there, and products made of three rounded ones."""


def tolerance(case: PagedCase) -> float:
    return (TOLERANCE if case.q.device.type == "cpu" else GPU_TOLERANCE)[case.q.dtype]


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


Name = Literal["cpu", "sdpa", "fixed shapes", "triton", "triton, deterministic", "flash", "flash 3", "flash 2"]
NAMES: tuple[Name, ...] = get_args(Name)
DETERMINISTIC: tuple[Name, ...] = ("cpu", "fixed shapes", "triton, deterministic")
FLASH = {"flash": "vllm.vllm_flash_attn", "flash 3": "flash_attn_interface", "flash 2": "flash_attn"}
IS_LINUX = platform.system() == "Linux"


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Name:
    return request.param  # type: ignore[no-any-return]


def backend_for(name: Name, case: PagedCase) -> AttentionBackend:
    _, num_heads, head_dim = case.q.shape
    config = replace(
        load_config(tiny_model()),
        num_heads=num_heads,
        num_kv_heads=case.pool.keys[0].shape[1],
        head_dim=head_dim,
    )
    needs = AttentionNeeds(config, case.q.device, case.q.dtype, case.pool.page_size, deterministic=name != "sdpa")
    if name in FLASH:
        return flash_backend(name, needs)
    if name.startswith("triton"):
        if not IS_LINUX:
            pytest.skip("Triton is for Linux")
        return make_attention_backend("triton", None, replace(needs, deterministic=name != "triton"))
    if name != "cpu":
        return make_attention_backend("sdpa", None, needs)
    if case.q.device.type != "cpu":
        pytest.skip("the kernels in C are for CPUs")
    if find_compiler() is None:
        pytest.skip("no C compiler")
    return make_attention_backend("cpu", Kernels(num_threads=2), needs)


def is_interpreted(name: Name, device: str) -> bool:
    return name.startswith("triton") and device == "cpu"


def row_by_row(matmul: Callable[..., np.ndarray], a: np.ndarray, b: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """In numpy, which multiplies for Triton's interpreter, a row's bits may depend on its place, as with AVX2."""
    return np.concatenate([matmul(a[row : row + 1], b, dtype=dtype) for row in range(len(a))])


def dtype_for(name: Name, dtype: torch.dtype, device: str) -> torch.dtype:
    """Triton's interpreter cannot multiply matrices of bfloat16: float16 stands for it there."""
    return torch.float16 if is_interpreted(name, device) and dtype == torch.bfloat16 else dtype


def flash_backend(name: Name, needs: AttentionNeeds) -> AttentionBackend:
    """On a GPU the package itself; on a CPU one that computes plainly what it is told."""
    if needs.device.type == "cuda":
        try:
            refuse_where_flash_fails(needs.device, needs.dtype, needs.config.head_dim)
            function = find_flash(needs.device, needs.page_size, _only(FLASH[name]))
        except FlashUnavailable as error:
            pytest.skip(str(error))
    else:
        package = "flash_attn_interface" if needs.page_size % 16 and name == "flash" else FLASH[name]
        function = find_flash(needs.device, needs.page_size, FakeFlash(package).load)
    return FlashBackend(function, needs.config, needs.page_size)


def flash_backend_of(fake: FakeFlash, case: PagedCase) -> FlashBackend:
    """By the only package that there is."""
    config = replace(load_config(tiny_model()), num_heads=case.q.shape[1], head_dim=case.q.shape[2])
    function = find_flash(case.q.device, case.pool.page_size, fake.load)
    return FlashBackend(function, config, case.pool.page_size)


def _only(package: str) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        if name != package:
            raise ModuleNotFoundError(f"{name} is not asked for")
        return importlib.import_module(name)

    return load


def attended(backend: AttentionBackend, case: PagedCase) -> Tensor:
    backend.plan(case.batch)
    result = backend.attend(case.q, case.pool.keys[0], case.pool.values[0])
    assert result.shape == (case.q.shape[0], case.q.shape[1] * case.q.shape[2])
    assert result.dtype == case.q.dtype
    return result


def check(name: Name, case: PagedCase) -> None:
    difference = attended(backend_for(name, case), case).double().cpu() - naive_attention(case)
    assert difference.abs().max() < tolerance(case)


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
    if is_interpreted(name, device):
        sequences = [(start, min(length, 130)) for start, length in sequences]  # its tiles are no larger
    check(name, make_case(sequences, dtype=dtype_for(name, dtype, device), device=device))


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


@settings(max_examples=20, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_random_batches(sequences: list[tuple[int, int]], page_size: int) -> None:
    for name in NAMES:
        check(name, make_case(sequences, page_size=page_size))


def test_many_long_decodes_exceed_what_one_gather_takes(name: Name) -> None:
    """Where they are few, they are split by Triton's kernels."""
    count = 3 if is_interpreted(name, "cpu") else 40
    case = make_case([(2500 + index, 1) for index in range(count)], num_heads=2, num_kv_heads=1, head_dim=8)
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


@pytest.mark.parametrize("sequences", [CASES["one decode"], CASES["decodes of many lengths"]], ids=["one", "many"])
def test_decodes_planned_on_the_device(name: Name, sequences: list[tuple[int, int]], device: str) -> None:
    """As a CUDA graph records them; deterministic backends give the same bits."""
    dtype = torch.bfloat16 if name in FLASH and device == "cuda" else torch.float32  # the packages take no other
    case = make_case(sequences, device=device, dtype=dtype)
    backend = backend_for(name, case)
    if not isinstance(backend, RecordableAttention):
        pytest.skip("cannot be recorded")
    if not backend.plans_on_device:
        assert name == "flash 2"
        pytest.skip("gathers as many keys as there are")
    expected = attended(backend, case)
    rows, positions = (torch.from_numpy(values).long().to(device) for values in (case.batch.rows, case.batch.starts))
    backend.plan_decodes(rows, positions, case.batch.table)
    result = backend.attend(case.q, case.pool.keys[0], case.pool.values[0])
    assert (result - expected).abs().max() < tolerance(case)
    assert torch.equal(result, expected) or name not in DETERMINISTIC


@pytest.mark.parametrize("name", ["triton", "triton, deterministic", "flash", "flash 3"])
def test_nothing_is_read_from_the_device_to_plan_decodes(name: Name) -> None:
    """Tensors without contents are enough, so nothing of a recording can depend on what they held."""
    backend = backend_for(name, make_case(CASES["one decode"]))
    assert isinstance(backend, RecordableAttention)
    rows, positions = torch.empty((2, 5), dtype=torch.int64, device="meta")
    backend.plan_decodes(rows, positions, torch.empty((9, 4096), dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_backends_give_a_token_the_same_bits_in_every_batch(
    name: Name, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behaviour 30: a sequence in one chunk, in several, token by token, and beside others."""
    dtype = dtype_for(name, dtype, device)
    if is_interpreted(name, device):
        monkeypatch.setattr(np, "matmul", partial(row_by_row, np.matmul))
    whole = make_case([(0, 200), (37, 90), (150, 1)], dtype=dtype, device=device)
    backend = backend_for(name, whole)
    expected = attended(backend, whole).clone()
    q, table, rows = whole.q, whole.batch.table, whole.batch.rows
    others = [(rows[1], 37, 90), (rows[2], 150, 1)]
    parts = [(0, 1), (1, 1), (2, 15), (17, 47), (64, 64), (128, 71), (199, 1), (0, 129), (129, 71)]
    for start, length in parts[1::3] if is_interpreted(name, device) else parts:
        for beside, q in (([], whole.q[:0]), (others, whole.q[200:])):
            columns = (np.array(column, np.int32) for column in zip((rows[0], start, length), *beside, strict=True))
            own = whole.q[start : start + length]
            part = replace(whole, batch=AttentionBatch(*columns, table), q=torch.cat((own, q)))
            result = attended(backend, part)
            assert torch.equal(result[:length], expected[start : start + length])
            assert torch.equal(result[length:], expected[200 : 200 + len(q)])


def test_flash_is_told_what_the_packages_want() -> None:
    """Pages of each sequence, and the newest version that computes on the device."""
    case = make_case(CASES["mixed"])
    needs = AttentionNeeds(load_config(tiny_model()), case.q.device, torch.bfloat16, case.pool.page_size)
    for package, version in ((FLASH["flash"], 2), (FLASH["flash"], 3), (FLASH["flash 3"], 3)):
        fake = FakeFlash(package, version=version)
        function = find_flash(needs.device, needs.page_size, fake.load)
        attended(FlashBackend(function, needs.config, needs.page_size), case)
        call = fake.calls[-1]
        assert call.get("fa_version", version) == version
        for sequence, (row, end) in enumerate(zip(case.batch.rows, case.batch.ends, strict=True)):
            slots = case.batch.table[int(row), :end]
            pages = call["block_table"][sequence, : -(-int(end) // needs.page_size)]
            assert torch.equal(pages.repeat_interleave(needs.page_size)[:end] * needs.page_size, slots - slots % 16)


def test_the_best_flash_package_is_found_and_others_say_why_not() -> None:
    device = torch.device("cpu")
    everything = FakeFlash(*FLASH.values())
    assert find_flash(device, 16, everything.load).module == "vllm.vllm_flash_attn"
    assert find_flash(device, 4, everything.load).module == "flash_attn_interface"
    assert find_flash(device, 4, FakeFlash("vllm.vllm_flash_attn", "flash_attn").load).form == "gathered"
    with pytest.raises(FlashUnavailable, match=r"pages are multiples of 16 tokens, and --page-size is 4.*No module"):
        find_flash(device, 4, FakeFlash("vllm_flash_attn").load)


@pytest.mark.parametrize(
    "error", [OSError("undefined symbol"), AssertionError(), DeprecationWarning("old"), KeyError("x")]
)
def test_a_flash_package_that_cannot_be_imported_is_passed_by_however_it_fails(error: Exception) -> None:
    """One that was built for another torch raises what it likes."""
    others = FakeFlash("flash_attn")

    def load(name: str) -> Any:
        if name == "vllm.vllm_flash_attn":
            raise error
        return others.load(name)

    assert find_flash(torch.device("cpu"), 16, load).module == "flash_attn"


def test_what_flash_gathers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of a batch may be more than a device holds: requests that share a prefix have it once in the pool."""
    monkeypatch.setattr(flash, "MAX_GATHERED_TOKENS", 100)
    case = make_case([(20, 1), (0, 33), (60, 20), (149, 1), (3, 1), (0, 1)])
    fake = FakeFlash("flash_attn")
    backend = flash_backend_of(fake, case)
    assert (attended(backend, case).double() - naive_attention(case)).abs().max() < tolerance(case)
    assert [call["cu_seqlens_k"].tolist() for call in fake.calls] == [[0, 21, 54], [0, 80], [0, 150], [0, 4, 5]]


def test_attention_that_cannot_be_had_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = AttentionNeeds(load_config(tiny_model()), torch.device("cpu"), torch.float32, 16)
    with pytest.raises(DeviceError, match=r"--attention flash does not work here: .* on GPUs alone"):
        make_attention_backend("flash", None, needs)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(DeviceError, match=r"--attention triton does not work here: Triton computes on GPUs.*Use auto"):
        make_attention_backend("triton", None, needs)
    with pytest.raises(DeviceError, match=r"--attention flash does not work here: .* last bits depend on what else"):
        make_attention_backend("flash", None, replace(needs, deterministic=True))
    assert make_attention_backend("auto", None, needs).name == "sdpa"


@pytest.mark.parametrize(
    ("packages", "page_size", "deterministic", "expected", "passed_by"),
    [
        (["vllm.vllm_flash_attn"], 16, False, "flash", {}),
        (["flash_attn_interface"], 1, False, "flash", {}),
        (["flash_attn"], 16, False, "triton", {"flash in place": "flash_attn cannot read our pages in place"}),
        ([], 16, False, "triton", {"flash in place": "No module named 'flash_attn'"}),
        (["vllm.vllm_flash_attn"], 16, True, "triton", {}),
    ],
)
def test_auto_on_a_gpu_takes_the_first_that_works(
    monkeypatch: pytest.MonkeyPatch,
    packages: list[str],
    page_size: int,
    deterministic: bool,
    expected: str,
    passed_by: dict[str, str],
) -> None:
    """And says in one line which, and why not those before it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(backends, "find_flash", partial(find_flash, load=FakeFlash(*packages).load))
    monkeypatch.setattr(backends, "try_attention", lambda *_: None)
    pytest.importorskip("worker.runner.attention.triton_backend")
    needs = AttentionNeeds(load_config(tiny_model()), torch.device("cuda"), torch.bfloat16, page_size, deterministic)
    with structlog.testing.capture_logs() as logs:
        assert make_attention_backend("auto", None, needs).name == expected
    line = logs[-1]
    assert line["backend"] == expected
    assert line["passed_by"].keys() == passed_by.keys()
    assert all(why in line["passed_by"][name] for name, why in passed_by.items())


def test_a_backend_whose_trial_fails_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package built for another GPU imports and fails when called: the next one serves, and the log says why."""

    def trial(backend: AttentionBackend, *_: Any) -> None:
        if backend.name != "sdpa":
            raise TrialFailed(f"its trial failed: RuntimeError: no kernel image for {backend.name}")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(backends, "find_flash", partial(find_flash, load=FakeFlash("vllm.vllm_flash_attn").load))
    monkeypatch.setattr(backends, "try_attention", trial)
    needs = AttentionNeeds(load_config(tiny_model()), torch.device("cuda"), torch.bfloat16, 16)
    with structlog.testing.capture_logs() as logs:
        assert make_attention_backend("auto", None, needs).name == "sdpa"
    assert logs[-1]["passed_by"].keys() == {"flash in place", "triton", "flash"}
    assert "no kernel image for triton" in logs[-1]["passed_by"]["triton"]
    with pytest.raises(DeviceError, match=r"--attention triton does not work here: its trial failed: .*Use auto"):
        make_attention_backend("triton", None, needs)


def test_a_trial_that_leaves_no_device_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried next would fail as well, and be blamed."""
    tried: list[str] = []

    def trial(backend: AttentionBackend, *_: Any) -> None:
        tried.append(backend.name)
        raise DeviceLost("its trial failed: AcceleratorError: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(backends, "find_flash", partial(find_flash, load=FakeFlash("vllm.vllm_flash_attn").load))
    monkeypatch.setattr(backends, "try_attention", trial)
    needs = AttentionNeeds(load_config(tiny_model()), torch.device("cuda"), torch.bfloat16, 16)
    with pytest.raises(DeviceError, match=r"flash in place attention has left cuda unusable: .*illegal.*--attention"):
        make_attention_backend("auto", None, needs)
    assert tried == ["flash"]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.skipif(not IS_LINUX, reason="Triton is for Linux")
def test_no_request_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """Whatever batch comes, its kernels were compiled at start: what they are compiled for is the same."""
    from worker.runner.attention import triton_backend as triton

    seen: set[tuple[object, ...]] = set()

    class Launched:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, _grid: tuple[int, ...]) -> Callable[..., None]:
            def run(*args: Any, **constants: Any) -> None:
                types = ((each.dtype, each.data_ptr() % 16) for each in args if isinstance(each, Tensor))
                seen.add((self.name, *types, *strides(args), *sorted(constants.items())))

            return run

    def strides(args: tuple[Any, ...]) -> list[int]:
        """Integers that are compiled in where they are 1 or multiples of 16; the width of `pages` is not."""
        integers = [each for each in args if isinstance(each, int)]
        return integers[-5:] if len(integers) > 1 else integers

    for name in ("attend_blocks", "combine_splits"):
        monkeypatch.setattr(triton, name, Launched(name))
    monkeypatch.setattr(triton, "num_processors", lambda _device: 132)
    batches = ([(700, 1)], [(300, 1)] * 2, [(600, 1)] * 9, [(15, 1)], [(0, 40), (90, 1)])
    cases = [make_case(sequences, num_heads=9, num_kv_heads=3) for sequences in batches]
    config = replace(load_config(tiny_model()), num_heads=9, num_kv_heads=3, head_dim=16)
    backend = triton.TritonBackend(config, 16, torch.float32, deterministic=deterministic)
    backend.compile(torch.float32, torch.device("cpu"))
    compiled = set(seen)
    assert len(compiled) == (2 if deterministic else 2 * (1 + 6) + 5), "attend_blocks for both layouts of queries"
    for case in cases:
        backend.plan(case.batch)
        # As layers give queries: by themselves, and, where torch rotates them, with their keys beside them.
        for queries in (case.q, torch.cat((case.q, case.q[:, :3]), dim=1)[:, :9]):
            backend.attend(queries, case.pool.keys[0], case.pool.values[0])
    assert seen == compiled
