"""How a torch runner is set up: plain data without torch, so that it travels to the runner's process."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Dtype: TypeAlias = Literal["auto", "bfloat16", "float16", "float32"]
AttentionName: TypeAlias = Literal["auto", "flash", "triton", "cpu", "sdpa"]


class TorchRunnerConfig(msgspec.Struct, frozen=True, tag="torch"):
    """Settings of one `TorchRunner`. Sizes in bytes and tokens."""

    model_path: str
    """A Hugging Face directory or a GGUF file on this machine: what `worker.model.sources.resolve_model` gives."""
    device: str = "cpu"
    """As torch names it, "cpu", "cuda", "cuda:1", or "auto": CUDA where torch sees a device, else the CPU."""
    dtype: Dtype = "auto"
    """Of weights, activations and KV. auto: bfloat16 where that is the fastest, else float32, on older GPUs float16."""
    device_memory_bytes: int | None = None
    """What the worker may use of the device. None: on a GPU what is free, on a CPU half of the machine's memory."""
    mem_fraction_static: float = 0.9
    """Share of the memory left after the weights that the KV pool may take."""
    max_total_tokens: int | None = None
    """Cap on the KV pool."""
    page_size: int = 16
    chunked_prefill_size: int | None = None
    """Prompt tokens computed in one step. None: by the device's memory."""
    max_running_requests: int | None = 32
    """Rows, and so sequences in a step. None: one for each 512 tokens of the KV pool, at most 256, on a CPU 32."""
    max_context_tokens: int | None = None
    """Longest prompt + completion. None: what the model was made for, or what the KV pool holds when that is less."""
    num_threads: int = 1
    """Threads of torch on a CPU."""
    attention: AttentionName = "auto"
    """flash, triton: for a GPU. cpu: kernels in C for a CPU, attention and, with bfloat16, all layers. sdpa: torch.
    auto: the first that works, in the order of `worker.runner.attention.backends`.
    """
    deterministic: bool = False
    """Tokens and log probabilities of a request do not depend on what else is computed with it, to the last bit."""
    cuda_graphs: bool = True
    """On a GPU, launch steps of decodes alone as one recorded graph each."""
    fused_layers: bool = True
    """On a GPU, compute what lies between linear layers and attention by kernels of Triton. False: to compare."""
