"""Attention backends by the names of the settings.

on a CPU    auto: cpu (kernels in C), where a compiler is found, else sdpa
on a GPU    auto: flash, where a package reads our pages in place; triton; flash, where K and V must be gathered for
            it; sdpa. For deterministic inference triton or sdpa. Each is tried out before it is chosen
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from worker.model.configuration import ModelConfig
from worker.runner.attention.cpu import MAX_HEAD_DIM, CpuBackend
from worker.runner.attention.fixed_shapes import FixedShapesBackend
from worker.runner.attention.flash import FlashBackend, FlashUnavailable, find_flash, refuse_where_flash_fails
from worker.runner.attention.protocol import AttentionBackend
from worker.runner.attention.sdpa import SdpaBackend
from worker.runner.attention.trial import DeviceLost, TrialFailed, try_attention
from worker.runner.devices import DeviceError
from worker.runner.kernels.compiler import KernelsUnavailable
from worker.runner.kernels.library import Kernels
from worker.runner.torch_config import AttentionName, Dtype

_log = structlog.get_logger()
_VOLTA = (7, 0)


def open_kernels(
    name: AttentionName, config: ModelConfig, device: torch.device, dtype: Dtype, num_threads: int
) -> Kernels | None:
    """The kernels in C for a CPU, compiled if need be; None where torch computes. Logs which, and what is lost.

    Raises DeviceError where the setting asks for them and they cannot be had.
    """
    if name not in ("auto", "cpu"):
        return None
    try:
        kernels = _kernels_for(config, device, dtype, num_threads)
    except KernelsUnavailable as error:
        why = f"{error}; {error.advice}" if error.advice else str(error)
        if name == "cpu":
            raise DeviceError(f"no kernels for --attention cpu: {why}, or use auto or sdpa") from error
        if device.type == "cpu":
            _log.warning("no kernels in C: attention and steps take two to five times as long", why=why)
        return None
    _log.info("kernels in C", uses=kernels.features, threads=kernels.num_threads)
    return kernels


def _kernels_for(config: ModelConfig, device: torch.device, dtype: Dtype, num_threads: int) -> Kernels:
    if device.type != "cpu" or dtype == "float16" or config.head_dim > MAX_HEAD_DIM:
        raise KernelsUnavailable("they compute float32 and bfloat16 on a CPU, heads of up to 256 elements")
    return Kernels(num_threads)


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a backend must be able to do."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    page_size: int
    deterministic: bool = False
    """A token's result must depend on its own sequence and position alone, to the last bit."""


class _Unavailable(Exception):
    """A backend cannot serve here; the message says why."""


def make_attention_backend(name: AttentionName, kernels: Kernels | None, needs: AttentionNeeds) -> AttentionBackend:
    """As `choose_attention`; on a GPU, logs one line about it."""
    on_gpu = needs.device.type != "cpu"
    if on_gpu:
        _log.info("trying attention; the first start on a machine may compile kernels for up to half a minute")
    backend, passed_by = choose_attention(name, kernels, needs)
    if on_gpu:
        _log.info("attention", backend=backend.name, passed_by=passed_by, deterministic=needs.deterministic)
    return backend


def choose_attention(
    name: AttentionName, kernels: Kernels | None, needs: AttentionNeeds
) -> tuple[AttentionBackend, dict[str, str]]:
    """The attention of a model (by `kernels`, where there are any), and why not those before it in auto's order.

    On a GPU all that it may launch has been compiled. Raises DeviceError where the setting names one that cannot be
    had, or none can, or where a trial has left the device unusable.
    """
    if kernels is not None:
        return CpuBackend(kernels, needs.config), {}
    if needs.device.type == "cpu" and name == "auto":
        return _make_sdpa(needs), {}
    passed_by: dict[str, str] = {}
    for each in _order(needs) if name == "auto" else (name,):
        try:
            backend = _MAKERS[each](needs)
            if needs.device.type == "cuda":
                try_attention(backend, needs.config, needs.page_size, needs.dtype, needs.device)
        except (_Unavailable, TrialFailed) as error:
            passed_by[each] = str(error)
        except DeviceLost as error:
            advice = "Name another one with --attention, or remove the package that it is of"
            raise DeviceError(f"the {each} attention has left {needs.device} unusable: {error}. {advice}") from error
        else:
            return backend, passed_by
    if name != "auto":
        raise DeviceError(f"--attention {name} does not work here: {passed_by[name]}. Use auto")
    reasons = "; ".join(f"{each}: {why}" for each, why in passed_by.items())
    raise DeviceError(f"no attention works on {needs.device}: {reasons}. Use --device cpu, or see radixfleet doctor")


def _order(needs: AttentionNeeds) -> tuple[str, ...]:
    if needs.deterministic:
        return ("triton", "sdpa")
    return ("flash in place", "triton", "flash", "sdpa")


def _make_flash(needs: AttentionNeeds, *, in_place: bool = False) -> AttentionBackend:
    if needs.deterministic:
        raise _Unavailable("with FlashAttention a token's last bits depend on what else is in the batch")
    try:
        refuse_where_flash_fails(needs.device, needs.dtype, needs.config.head_dim)
        function = find_flash(needs.device, needs.page_size)
    except FlashUnavailable as error:
        raise _Unavailable(str(error)) from error
    if in_place and function.form == "gathered":
        raise _Unavailable(f"{function.module} cannot read our pages in place")
    return FlashBackend(function, needs.config, needs.page_size)


def _make_triton(needs: AttentionNeeds) -> AttentionBackend:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if needs.device.type == "cpu" and not interpreted:
        raise _Unavailable("Triton computes on GPUs (on a CPU only its interpreter does, with TRITON_INTERPRET=1)")
    if needs.device.type == "cuda" and torch.cuda.get_device_capability(needs.device) < _VOLTA:
        raise _Unavailable("Triton needs a Volta GPU or a later one")
    try:
        from worker.runner.attention.triton_backend import TritonBackend
    except ImportError as error:
        raise _Unavailable(f"{error} (pip install 'radixfleet[gpu]')") from error
    return TritonBackend(needs.config, needs.page_size, needs.dtype, deterministic=needs.deterministic)


def _make_sdpa(needs: AttentionNeeds) -> AttentionBackend:
    return (FixedShapesBackend if needs.deterministic else SdpaBackend)(needs.config.num_kv_heads)


def _refuse_cpu(_: AttentionNeeds) -> AttentionBackend:
    raise _Unavailable("its kernels are for CPUs")


_MAKERS: dict[str, Callable[[AttentionNeeds], AttentionBackend]] = {
    "flash in place": partial(_make_flash, in_place=True),
    "flash": _make_flash,
    "triton": _make_triton,
    "sdpa": _make_sdpa,
    "cpu": _refuse_cpu,
}
