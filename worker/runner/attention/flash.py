"""Attention by FlashAttention, from whichever package there is.

    package                         calls                                    pages            keys split
    vllm.vllm_flash_attn,           flash_attn_varlen_func with seqused_k    multiples of 16  as asked (version 3),
    vllm_flash_attn                 and block_table                                           as it likes (version 2)
    flash_attn_interface            flash_attn_with_kvcache with page_table  all              as asked
    flash_attn                      flash_attn_varlen_func                   of 256: so K and V are gathered first

vllm_flash_attn is part of vLLM's wheels (its own on PyPI is of 2024 and goes with torch 2.4 alone). The third is
FlashAttention 3 for Hopper; flash_attn is version 2 as on PyPI. All of them compute float16 and bfloat16 on Ampere and
later, heads of up to 256 elements. Their causal mask ends at the bottom right: the last query sees the last key, which
is what a chunk on a prefix needs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from worker.memory.transfers import upload, upload_indices
from worker.model.configuration import ModelConfig
from worker.runner.attention.paged import PagedBatch, as_pages
from worker.runner.attention.protocol import AttentionBatch

MAX_HEAD_DIM = 256
_AMPERE, _HOPPER, _BLACKWELL = (8, 0), (9, 0), (10, 0)
_PAGE_MULTIPLE = 16
"""Of vLLM's form of version 2, and asked of its version 3 as well."""

Form: TypeAlias = Literal["varlen", "kvcache", "gathered"]


class FlashUnavailable(Exception):
    """There is no FlashAttention that serves here; the message says why."""


@dataclass(frozen=True, slots=True)
class FlashFunction:
    """The function of a package, and how it is called."""

    module: str
    form: Form
    call: Callable[..., Any]
    options: dict[str, Any]
    """Passed to each call as they are."""
    splits_as_asked: bool
    """num_splits is obeyed, so that a row's bits need not depend on its batch."""


def find_flash(
    device: torch.device, page_size: int, load: Callable[[str], Any] = importlib.import_module
) -> FlashFunction:
    """The best of the installed packages. Raises FlashUnavailable. `load` imports a module by name."""
    why: list[str] = []
    for name, adapt in _PACKAGES:
        try:
            function = adapt(name, load(name), device, page_size)
        except Exception as error:  # noqa: BLE001 - a package that was built for another torch fails in many ways
            why.append(f"{name}: {error}")
        else:
            return function
    raise FlashUnavailable("; ".join(why))


def _vllm(name: str, module: Any, device: torch.device, page_size: int) -> FlashFunction:
    call = module.flash_attn_varlen_func
    takes = inspect.signature(call).parameters
    if "seqused_k" not in takes or "block_table" not in takes:
        raise FlashUnavailable("it is too old to read pages in place")
    if page_size % _PAGE_MULTIPLE:
        raise FlashUnavailable(f"its pages are multiples of {_PAGE_MULTIPLE} tokens, and --page-size is {page_size}")
    is_third = "fa_version" in takes and bool(module.is_fa_version_supported(3, device))
    options = {"fa_version": 3 if is_third else 2} if "fa_version" in takes else {}
    return FlashFunction(name, "varlen", call, options, splits_as_asked=is_third and "num_splits" in takes)


def _third(name: str, module: Any, device: torch.device, page_size: int) -> FlashFunction:
    if device.type == "cuda" and not _HOPPER <= torch.cuda.get_device_capability(device) < _BLACKWELL:
        raise FlashUnavailable("it is made for Hopper GPUs")
    return FlashFunction(name, "kvcache", module.flash_attn_with_kvcache, {}, splits_as_asked=True)


def _second(name: str, module: Any, device: torch.device, page_size: int) -> FlashFunction:
    return FlashFunction(name, "gathered", module.flash_attn_varlen_func, {}, splits_as_asked=False)


_PACKAGES: Sequence[tuple[str, Callable[[str, Any, torch.device, int], FlashFunction]]] = (
    ("vllm.vllm_flash_attn", _vllm),
    ("vllm_flash_attn", _vllm),
    ("flash_attn_interface", _third),
    ("flash_attn", _second),
)


def refuse_where_flash_fails(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raises FlashUnavailable where no package could serve."""
    if device.type != "cuda":
        raise FlashUnavailable("FlashAttention computes on GPUs alone")
    if torch.cuda.get_device_capability(device) < _AMPERE:
        raise FlashUnavailable("FlashAttention needs an Ampere GPU or a later one")
    if dtype not in (torch.bfloat16, torch.float16):
        raise FlashUnavailable(f"FlashAttention computes bfloat16 and float16, not {dtype}".replace("torch.", ""))
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise FlashUnavailable(f"FlashAttention takes heads of 8, 16, ... {MAX_HEAD_DIM} elements, not of {head_dim}")


class FlashBackend:
    """Implements `AttentionBackend`. See the module's docstring."""

    name = "flash"

    def __init__(self, function: FlashFunction, config: ModelConfig, page_size: int, *, deterministic: bool) -> None:
        """`deterministic` asks for a function with `splits_as_asked`."""
        assert function.splits_as_asked or not deterministic
        self._function = function
        self._scale = config.head_dim**-0.5
        self._page_size = page_size
        self._num_splits = 1 if deterministic else 0
        """0: the kernels choose, by what occupies the device."""
        self._batch: PagedBatch | None = None
        self._gathered: _Gathered | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Copy offsets, lengths and pages to the device; for the gathered form, the slots of all keys."""
        self._batch = PagedBatch.of(batch, self._page_size)
        self._gathered = _Gathered.of(batch) if self._function.form == "gathered" else None

    @property
    def plans_on_device(self) -> bool:
        """See `RecordableAttention`: how many keys are gathered depends on the lengths."""
        return self._function.form != "gathered"

    def plan_decodes(self, rows: Tensor, positions: Tensor, table: Tensor) -> None:
        """See `RecordableAttention`."""
        assert self.plans_on_device
        self._batch = PagedBatch.of_decodes(rows, positions, table, self._page_size)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
        batch, function = self._batch, self._function
        assert batch is not None, "attend before plan"
        if self._gathered is not None:
            slots = self._gathered.slots
            given = {
                "q": q,
                "k": keys.index_select(0, slots),
                "v": values.index_select(0, slots),
                "cu_seqlens_k": self._gathered.key_offsets,
                "max_seqlen_k": batch.longest_end,
            }
        elif function.form == "varlen":
            given = {
                "q": q,
                "k": as_pages(keys, self._page_size),
                "v": as_pages(values, self._page_size),
                "seqused_k": batch.ends,
                "max_seqlen_k": batch.longest_end,
                "block_table": batch.pages,
                "num_splits": self._num_splits,
            }
        else:
            given = {
                "q": q,
                "k_cache": as_pages(keys, self._page_size),
                "v_cache": as_pages(values, self._page_size),
                "cache_seqlens": batch.ends,
                "page_table": batch.pages,
                "num_splits": self._num_splits,
            }
        attended = function.call(
            **given,
            cu_seqlens_q=batch.query_offsets,
            max_seqlen_q=batch.longest_query,
            softmax_scale=self._scale,
            causal=True,
            **function.options,
        )
        result: Tensor = attended[0] if isinstance(attended, tuple) else attended
        return result.flatten(1)


@dataclass(frozen=True, slots=True)
class _Gathered:
    slots: Tensor
    """int64: of all positions of all sequences, one sequence after another."""
    key_offsets: Tensor
    """int32 [num_sequences + 1]"""

    @classmethod
    def of(cls, batch: AttentionBatch) -> _Gathered:
        device, ends = batch.table.device, batch.ends.astype(np.int64)
        offsets = np.zeros(len(ends) + 1, np.int64)
        np.cumsum(ends, out=offsets[1:])
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], ends)
        rows = upload_indices(np.repeat(batch.rows, ends), device)
        slots = batch.table[rows, upload_indices(positions, device)].long()
        return cls(slots, upload(offsets.astype(np.int32), device))
