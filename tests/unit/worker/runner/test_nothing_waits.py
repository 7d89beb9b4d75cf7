"""No step waits for a CUDA device, whatever its rows ask for: launched whole on one without contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixfleet.types import Capacity, Grammar, MemoryPools
from tests.support.fake_cuda import CUDA, DeviceWaited, FakeCuda, fake_cuda
from tests.support.grammars import regex
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_model import tiny_model
from worker.core.logits import LogitEdits
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.memory.transfers import download, upload
from worker.model.configuration import ModelConfig, load_config
from worker.model.layer_ops import torch_ops
from worker.model.linear import DenseBackend
from worker.model.llama import LayerWeights, LlamaModel, ModelWeights
from worker.model.rotary import RotaryEmbedding, inverse_frequencies
from worker.model.row_invariance import RowInvariantLinear
from worker.model.tokenizer_files import load_tokenizer_spec
from worker.runner.attention.fixed_shapes import FixedShapesBackend
from worker.runner.attention.flash import FlashBackend, FlashFunction, Form
from worker.runner.attention.protocol import AttentionBackend
from worker.runner.attention.sdpa import SdpaBackend
from worker.runner.computer_parts import ComputerParts
from worker.runner.rows import RowState
from worker.runner.step_computer import StepComputer
from worker.sampling.batch import SamplingBatch
from worker.sampling.grammar import GrammarCompiler
from worker.sampling.host_draw import Winners, winners_by_bounds
from worker.sampling.nucleus import nucleus_by_kernel
from worker.sampling.sampler import sample

pytest.importorskip("triton", reason="Triton is for Linux")
FUSED = pytest.importorskip("worker.model.fused_ops").FUSED
PAGE, MAX_ROWS, CONTEXT = 16, 12, 256
PROMPT = list(range(3, 60))
HISTORY = np.array(PROMPT, np.int32)


def flash(form: Form) -> Callable[[ModelConfig], AttentionBackend]:
    function = FlashFunction("fake", form, lambda q, **_: torch.empty_like(q), {})
    return lambda config: FlashBackend(function, config, PAGE)


def triton(config: ModelConfig, *, deterministic: bool = False) -> AttentionBackend:
    module = pytest.importorskip("worker.runner.attention.triton_backend")
    return module.TritonBackend(config, PAGE, torch.bfloat16, deterministic=deterministic)  # type: ignore[no-any-return]


class Nowhere:
    """A kernel's launches, none of which is computed."""

    def __getitem__(self, _grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **_: object) -> None:
            assert all(each.device == CUDA for each in args if isinstance(each, Tensor))

        return launch


ATTENTION: dict[str, Callable[[ModelConfig], AttentionBackend]] = {
    "triton": triton,
    "triton, deterministic": lambda config: triton(config, deterministic=True),
    "flash": flash("varlen"),
    "flash 3": flash("kvcache"),
    "flash 2": flash("gathered"),
    "sdpa": lambda config: SdpaBackend(config.num_kv_heads),
    "sdpa, deterministic": lambda config: FixedShapesBackend(config.num_kv_heads),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    for name, value in (
        ("attend_blocks", Nowhere()),
        ("combine_splits", Nowhere()),
        ("num_processors", lambda _device: 132),
    ):
        monkeypatch.setattr(f"worker.runner.attention.triton_backend.{name}", value)
    monkeypatch.setattr("worker.sampling.triton_kernels.find_thresholds", Nowhere())
    for name in ("add_and_norm", "rotate_and_keep", "gate"):
        monkeypatch.setattr(f"worker.model.triton_kernels.{name}", Nowhere())
    monkeypatch.setattr("worker.sampling.filters.kernel_or", lambda _other, _device: nucleus_by_kernel)
    tiny_model()  # written here, where tensors have contents
    with fake_cuda() as fake:
        yield fake


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def tensor(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=CUDA)


def make_model(config: ModelConfig, *, is_deterministic: bool, is_fused: bool) -> LlamaModel:
    def linear(out_features: int, in_features: int) -> Any:
        layer = DenseBackend().prepare(tensor(out_features, in_features), None)
        return RowInvariantLinear(layer, (1, 32)) if is_deterministic else layer

    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = LayerWeights(
        attention_norm=tensor(hidden),
        qkv=linear(query + 2 * key_value, hidden),
        query_norm=tensor(config.head_dim),
        key_norm=tensor(config.head_dim),
        output=linear(hidden, query),
        mlp_norm=tensor(hidden),
        gate_up=linear(2 * inner, hidden),
        down=linear(hidden, inner),
    )
    weights = ModelWeights(
        tensor(config.vocab_size, hidden), (layer,), tensor(hidden), linear(config.vocab_size, hidden), 0
    )
    rotary = RotaryEmbedding(inverse_frequencies(config), CONTEXT, torch.bfloat16, CUDA)
    return LlamaModel(config, weights, rotary, FUSED if is_fused else torch_ops())


class LaunchingRunner:
    """Implements `Runner` as far as steps are launched; nobody asks what they give."""

    def __init__(self, name: str, threads: ThreadPoolExecutor, *, is_fused: bool = True) -> None:
        path = tiny_model()
        config, is_deterministic = load_config(path), "deterministic" in name
        attention = ATTENTION[name](config)
        parts = ComputerParts(CUDA, torch.bfloat16, PAGE, is_deterministic, None, False, attention)
        rows = RowState(max_rows=MAX_ROWS, max_context=CONTEXT, vocab_size=config.vocab_size, device=CUDA)
        sampler = parts.sampler(rows, GrammarCompiler(load_tokenizer_spec(path)), threads)
        model = make_model(config, is_deterministic=is_deterministic, is_fused=is_fused)
        self.computer: StepComputer = parts.computer(model, rows, sampler, num_pages=200)
        self.settled = 0

    def load(self) -> Ready:
        pools = MemoryPools(
            device="cuda", total_bytes=1, weights_bytes=0, kv_bytes=0, activations_bytes=1, bounded_by=""
        )
        capacity = Capacity(kv_tokens=3000, page_size=PAGE, max_running_requests=8, chunked_prefill_size=64)
        return Ready(capacity=capacity, memory=pools, num_parameters=1, dtype="bfloat16", max_context_tokens=CONTEXT)

    def run(self, plan: StepPlan) -> StepResult:
        self.computer.launch(plan, self.settle_all)
        nothing = np.zeros(plan.num_sequences, np.int32)
        return StepResult(plan.step, nothing, nothing.astype(np.bool_), 0.0, 0.0)

    def settle_all(self) -> None:
        self.settled += 1

    def prepare(self, grammar: Grammar) -> str:
        return ""

    def close(self) -> None: ...


ROWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_p": {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    "top_k and min_p": {"temperature": 1.3, "top_k": 40, "min_p": 0.05},
    "penalties and bias": {
        "edits": LogitEdits(frequency_penalty=0.1, presence_penalty=0.2, repetition_penalty=1.1, bias=((5, 1.0),)),
        "history": HISTORY,
    },
    "grammar": {"edits": LogitEdits(grammar=regex("[a-z]+")), "history": HISTORY, "temperature": 1.0, "top_p": 0.5},
    "log probabilities": {"logprobs": 5, "prompt_logprobs": 3, "history": HISTORY},
    "least length": {"min_new_tokens": 5, "stop_token_ids": (2, 7)},
}


def drive(driver: RunnerDriver, names: Sequence[str]) -> None:
    """Whole prompts, chunks beside decodes, a cached prefix, decodes alone, and a row that is taken again."""
    rows = range(len(names))
    for row, name in enumerate(names):
        driver.begin(row, PROMPT, **ROWS[name])
    driver.step(dict.fromkeys(rows, len(PROMPT)))
    driver.begin(7, PROMPT)
    driver.step({7: 20, **dict.fromkeys(rows, 0)})
    driver.begin(8, PROMPT, prefix_slots=list(range(16, 48)))
    driver.step({7: 37, 8: 25, 0: 0})
    driver.decode([*rows, 7, 8], 1)
    driver.end(0)
    driver.begin(0, PROMPT[:9])
    driver.step({0: 9})
    driver.decode([0, 8], 1)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_no_step_waits_for_the_device(name: str, is_fused: bool, device: FakeCuda, threads: ThreadPoolExecutor) -> None:
    """In each kind of step, by each attention, with both kinds of layers."""
    with device.loading():
        runner = LaunchingRunner(name, threads, is_fused=is_fused)
    drive(RunnerDriver(runner), ["greedy", "log probabilities"])
    assert device.num_copies > 50, "what steps are told and tell is copied"
    assert runner.settled == 0


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("asked", ROWS)
def test_nothing_that_a_row_asks_for_waits(
    asked: str, is_deterministic: bool, device: FakeCuda, threads: ThreadPoolExecutor
) -> None:
    """Every way of drawing, editing and telling; but grammars wait for the tokens of the steps before, on the host."""
    with device.loading():
        runner = LaunchingRunner("triton, deterministic" if is_deterministic else "triton", threads)
    driver = RunnerDriver(runner)
    for row, name in enumerate(("greedy", asked)):
        driver.begin(row, PROMPT, **ROWS[name])
    driver.step({0: 30, 1: len(PROMPT)})
    driver.step({0: 27, 1: 0})
    assert runner.settled == (2 if asked == "grammar" else 0)


@pytest.mark.parametrize(("has_kernel", "batches"), [(True, [2]), (False, [1, 1])])
def test_rows_are_drawn_together_where_that_changes_no_bit(
    has_kernel: bool,
    batches: list[int],
    device: FakeCuda,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deterministic inference draws rows one by one elsewhere, which takes a hundred times as many launches."""
    seen: list[int] = []

    def counting(logits: Tensor, batch: SamplingBatch, winners: Winners = winners_by_bounds) -> tuple[Tensor, Tensor]:
        seen.append(len(logits))
        return sample(logits, batch, winners)

    monkeypatch.setattr("worker.runner.step_sampler.sample", counting)
    if not has_kernel:
        monkeypatch.setattr("worker.sampling.filters.kernel_or", lambda other, _device: other)
    with device.loading():
        runner = LaunchingRunner("triton, deterministic", threads)
    driver = RunnerDriver(runner)
    for row in range(2):
        driver.begin(row, PROMPT, **ROWS["top_p"])
    driver.step(dict.fromkeys(range(2), len(PROMPT)))
    assert seen == batches


def test_top_p_without_a_kernel_waits_for_nothing_either(
    device: FakeCuda, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.sampling.filters.kernel_or", lambda other, _device: other)
    with device.loading():
        runner = LaunchingRunner("flash", threads)
    driver = RunnerDriver(runner)
    driver.begin(0, PROMPT, **ROWS["top_p"])
    driver.prefill(0)
    assert device.num_copies > 5


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ["triton", "triton, deterministic", "flash", "flash 3"])
def test_what_a_graph_records_is_of_the_device_alone(
    name: str, is_fused: bool, device: FakeCuda, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy from or to the host; and steps that are replayed wait for nothing either."""
    replays: list[str] = []

    def record(compute: Callable[[], None]) -> Callable[[], None]:
        with device.recording():
            compute()

        def replay() -> None:
            replays.append(name)
            compute()

        return replay

    monkeypatch.setattr("worker.runner.decode_graphs.DecodeGraphs.check", lambda *_: None)
    with device.loading():
        runner = LaunchingRunner(name, threads, is_fused=is_fused)
        assert runner.computer.can_record
    runner.computer.record_decodes([1, 4, 12], record)
    drive(RunnerDriver(runner), ["greedy"])
    assert len(replays) == 2


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: int(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x),
        lambda x: x.numpy(),
        lambda x: x.index_put_((x,), torch.tensor(1)),
        lambda x: x + torch.tensor([1, 2, 3], device=CUDA),
        lambda x: x + torch.arange(3).to(CUDA),
        lambda x: x + torch.arange(3).to(CUDA, non_blocking=True),
        lambda x: torch.empty(3, dtype=torch.int64).copy_(x, non_blocking=True),
        lambda x: torch.empty(3, dtype=torch.int64, pin_memory=True).copy_(x),
    ],
)
def test_what_waits_is_found(wait: Callable[[Tensor], object], device: FakeCuda) -> None:
    x = torch.zeros(3, dtype=torch.int64, device=CUDA)
    with pytest.raises((DeviceWaited, RuntimeError)):
        wait(x)


def test_transfers_do_not_wait(device: FakeCuda) -> None:
    there = upload(np.arange(3), CUDA)
    assert there.device == CUDA
    assert download(there).device.type == "cpu"
    assert device.num_copies == 2
