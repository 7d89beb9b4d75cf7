"""Attention backends by the names of the settings."""

from __future__ import annotations

import structlog
import torch

from worker.model.configuration import ModelConfig
from worker.runner.attention.cpu import MAX_HEAD_DIM, CpuBackend
from worker.runner.attention.fixed_shapes import FixedShapesBackend
from worker.runner.attention.protocol import AttentionBackend
from worker.runner.attention.sdpa import SdpaBackend
from worker.runner.devices import DeviceError
from worker.runner.kernels.compiler import KernelsUnavailable
from worker.runner.kernels.library import Kernels
from worker.runner.torch_config import AttentionName

_log = structlog.get_logger()
_DTYPES = (torch.float32, torch.bfloat16)


def open_kernels(
    name: AttentionName, config: ModelConfig, device: torch.device, dtype: torch.dtype, num_threads: int
) -> Kernels | None:
    """The kernels in C for a CPU, compiled if need be; None where torch computes. Logs which, and what is lost.

    Raises DeviceError where the setting asks for them and they cannot be had.
    """
    if name == "sdpa":
        return None
    try:
        kernels = _kernels_for(config, device, dtype, num_threads)
    except KernelsUnavailable as error:
        if name == "cpu":
            raise DeviceError(f"no kernels for --attention cpu: {error}; use auto or sdpa") from error
        if device.type == "cpu":
            _log.warning("no kernels in C: attention and steps take about twice as long", why=str(error))
        return None
    _log.info("kernels in C", uses=kernels.features, threads=kernels.num_threads)
    return kernels


def _kernels_for(config: ModelConfig, device: torch.device, dtype: torch.dtype, num_threads: int) -> Kernels:
    if device.type != "cpu" or dtype not in _DTYPES or config.head_dim > MAX_HEAD_DIM:
        raise KernelsUnavailable("they compute float32 and bfloat16 on a CPU, heads of up to 256 elements")
    return Kernels(num_threads)


def make_attention_backend(
    kernels: Kernels | None, config: ModelConfig, *, deterministic: bool = False
) -> AttentionBackend:
    """The attention of a model: by the kernels where there are any.

    `deterministic`: a token's result must depend on its own sequence and position alone, to the last bit, as that of
    the kernels always does.
    """
    if kernels is not None:
        return CpuBackend(kernels, config)
    return (FixedShapesBackend if deterministic else SdpaBackend)(config.num_kv_heads)
