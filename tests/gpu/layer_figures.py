"""Each operation between linear layers by torch and by one kernel of Triton: `python -m tests.gpu.layer_figures`.

In the sizes of a published model (`--model qwen3-8b`): microseconds on the device, launches not counted, and the share
of the memory's speed at which what must be read and written would pass (`--bandwidth` in GB/s: 4,800 of an H200, 3,350
of an H100). `--device cpu` tries the script out, by Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.memory.kv_pool import KvPlace
from worker.model.configuration import ModelConfig
from worker.model.layer_ops import HeadNorms, LayerOps, torch_ops
from worker.model.shapes import KNOWN_SHAPES

TOKENS = (1, 16, 256, 2048, 8192)


@dataclass(frozen=True)
class Case:
    """One operation on some tokens."""

    name: str
    compute: Callable[[LayerOps], Any]
    num_bytes: int
    """To be read and written at least."""


def cases(config: ModelConfig, num_tokens: int, device: str) -> Iterator[Case]:
    """All operations, in bfloat16."""

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    hidden, added = tensor(num_tokens, config.hidden_size), tensor(num_tokens, config.hidden_size)
    weight = tensor(config.hidden_size)
    yield Case(
        "add_and_norm",
        lambda ops: ops.add_and_norm(hidden, added, weight, config.rms_norm_eps),
        4 * hidden.nbytes,
    )
    num_all, head_dim = config.num_heads + 2 * config.num_kv_heads, config.head_dim
    heads = tensor(num_tokens, num_all, head_dim)
    factors = (tensor(num_tokens, 1, head_dim), tensor(num_tokens, 1, head_dim))
    norms = HeadNorms(tensor(head_dim), tensor(head_dim), config.rms_norm_eps) if config.qk_norm else None
    pool = tensor(2, num_tokens + 16, config.num_kv_heads, head_dim)
    place = KvPlace(pool[0], pool[1], torch.arange(num_tokens, device=device) + 16)
    yield Case(
        "rotate_and_keep",
        lambda ops: ops.rotate_and_keep(heads, factors, norms, place),
        2 * heads.nbytes + factors[0].nbytes,
    )
    gate_up = tensor(num_tokens, 2 * config.intermediate_size)
    yield Case("gate", lambda ops: ops.gate(gate_up), gate_up.nbytes * 3 // 2)


def seconds(compute: Callable[[], Any], device: str) -> float:
    """Of one call, on the device."""
    if device == "cpu":
        began_s = time.perf_counter()
        compute()
        return time.perf_counter() - began_s
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(compute, rep=20, return_mode="median")) / 1e3


@torch.inference_mode()
def main() -> None:
    """A line for each operation and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="qwen3-8b", choices=list(KNOWN_SHAPES))
    parser.add_argument("--bandwidth", type=float, default=4800.0)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    options = parser.parse_args()
    from worker.model.fused_ops import FUSED

    plain, config = torch_ops(), KNOWN_SHAPES[options.model].config
    print(f"{options.model}, bfloat16; us on the device by torch and by a kernel, and what the memory's speed allows")
    saved_us = dict.fromkeys(options.tokens, 0.0)
    for num_tokens in options.tokens:
        for case in cases(config, num_tokens, options.device):
            by_torch, fused = (
                1e6 * seconds(lambda ops=ops, case=case: case.compute(ops), options.device)  # type: ignore[misc]
                for ops in (plain, FUSED)
            )
            bound = case.num_bytes / (options.bandwidth * 1e3)
            times = 2 if case.name == "add_and_norm" else 1
            saved_us[num_tokens] += times * (by_torch - fused)
            print(
                f"{case.name:16} {num_tokens:6} tokens: torch {by_torch:8.1f}, kernel {fused:8.1f} "
                f"({by_torch / fused:4.1f}x), bound {bound:8.1f} ({100 * bound / fused:3.0f} %)",
                flush=True,
            )
    for num_tokens, per_layer in saved_us.items():
        whole = per_layer * config.num_layers / 1e3
        print(f"saved in a step of {num_tokens:6} tokens: {per_layer:7.1f} us a layer, {whole:7.2f} ms in all")


if __name__ == "__main__":
    main()
