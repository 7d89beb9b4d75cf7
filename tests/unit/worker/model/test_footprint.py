from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.random_weights import random_model, shape
from worker.memory.kv_pool import TokenToKVPool
from worker.model.configuration import ModelConfig
from worker.model.footprint import FORMATS, estimate_activations, weights_bytes
from worker.model.shapes import KNOWN_SHAPES
from worker.runner.activation_peak import activation_peak
from worker.runner.attention.backends import AttentionNeeds, make_attention_backend
from worker.runner.largest_step import largest_step
from worker.runner.row_edits import RowEdits
from worker.runner.rows import RowState
from worker.runner.step_computer import StepComputer
from worker.runner.step_sampler import StepSampler
from worker.sampling import filters, sampler

CPU = torch.device("cpu")


def measured(config: ModelConfig, dtype: torch.dtype, chunk: int, rows: int, context: int) -> int:
    """The peak as a worker measures it at start, without the table of rows."""
    row_state = RowState(max_rows=rows, max_context=context, vocab_size=config.vocab_size, device=CPU)
    threads = ThreadPoolExecutor(1)
    edits = RowEdits(max_rows=rows, vocab_size=config.vocab_size, device=CPU, compiler=None, threads=threads)
    computer = StepComputer(
        model=random_model(config, dtype),
        pool=TokenToKVPool(
            num_pages=1,
            page_size=16,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=CPU,
        ),
        rows=row_state,
        sampler=StepSampler(rows=row_state, edits=edits, max_rows=rows, device=CPU),
        attention=make_attention_backend("sdpa", None, AttentionNeeds(config, CPU, dtype, page_size=16)),
        device=CPU,
    )
    return activation_peak(CPU, lambda: computer.compute(largest_step(rows, chunk, context)))


WIDE_MLP = {"hidden_size": 512, "intermediate_size": 2048, "num_heads": 4, "num_kv_heads": 1, "head_dim": 128}
BIG_VOCABULARY = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "vocab_size", "chunk", "rows", "context", "part"),
    [
        (WIDE_MLP, 1024, 512, 2, 512, "layer"),  # the MLP
        (WIDE_MLP, 1024, 16, 16, 4096, "layer"),  # gathered keys and values
        (BIG_VOCABULARY, 65_536, 16, 8, 64, "sampling"),
    ],
)
def test_the_estimate_of_activations_is_what_a_worker_measures(
    sizes: dict[str, int],
    vocab_size: int,
    chunk: int,
    rows: int,
    context: int,
    part: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker on a GPU: on a CPU tokens are drawn with next to no memory, which no plan is asked about."""
    monkeypatch.setattr(sampler, "_sample_on_host", lambda logits, batch, _: sampler._sample_on_device(logits, batch))
    monkeypatch.setattr(filters, "kernel_or", lambda other, _device: other)
    config = shape(**sizes, vocab_size=vocab_size, num_layers=1, max_context_tokens=4096)
    estimate = estimate_activations(config, chunk=chunk, rows=rows, context=context, element_bytes=dtype.itemsize)
    assert (estimate.layer > estimate.sampling) is (part == "layer")
    assert estimate.rows == rows * (context + vocab_size) * 4
    peak = measured(config, dtype, chunk, rows, context)
    # A faster way to compute a step may need less than the plain one that the formula follows, never much more.
    assert 0.4 < peak / (estimate.total - estimate.rows) < 1.1


def test_a_70b_model_takes_140_gb_in_bf16_and_about_70_in_fp8() -> None:
    config = KNOWN_SHAPES["llama-3.1-70b"].config
    assert weights_bytes(config, FORMATS["bfloat16"]) == 2 * config.num_parameters == 141_107_412_992
    fp8 = weights_bytes(config, FORMATS["fp8"])
    others = 2 * config.vocab_size * config.hidden_size
    assert 0 < fp8 - (config.num_parameters + others) < 2 * config.hidden_size * 161 * 2  # the norms, at two bytes
    assert 70e9 < fp8 < 73e9
    assert weights_bytes(config, FORMATS["float32"]) == 4 * config.num_parameters
    assert weights_bytes(config, FORMATS["int4"]) < fp8 * 0.6
