"""Attention by FlashAttention, from whichever package there is.

    package                         calls                                    pages
    vllm.vllm_flash_attn,           flash_attn_varlen_func with seqused_k    multiples of 16
    vllm_flash_attn                 and block_table
    flash_attn_interface            flash_attn_with_kvcache with page_table  all
    flash_attn                      flash_attn_varlen_func                   of 256: K and V are gathered, in portions

vllm_flash_attn is part of vLLM's wheels (its own on PyPI is of 2024 and goes with torch 2.4 alone). The third is
FlashAttention 3 for Hopper; flash_attn is version 2 as on PyPI. All of them compute float16 and bfloat16 on Ampere and
later, heads of up to 256 elements. Their causal mask ends at the bottom right: the last query sees the last key, which
is what a chunk on a prefix needs. How they cut the keys of a sequence, and so a token's last bits, follows from the
longest query and the number of sequences in its batch: none serves deterministic inference.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.core.arrays import Int32Array
from worker.memory.transfers import upload, upload_indices
from worker.model.configuration import ModelConfig
from worker.runner.attention.paged import PagedBatch, as_pages
from worker.runner.attention.protocol import AttentionBatch

MAX_HEAD_DIM = 256
MAX_GATHERED_TOKENS = 65_536
"""Keys of so many tokens are gathered at once, as by the reference: a batch may have more than the device holds."""
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


def find_flash(
    device: torch.device, page_size: int, load: Callable[[str], Any] = importlib.import_module
) -> FlashFunction:
    """The best of the installed packages for `device`, which is the current one. Raises FlashUnavailable.

    `load` imports a module by name.
    """
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
    if not {"seqused_k", "block_table", "fa_version"} <= inspect.signature(call).parameters.keys():
        raise FlashUnavailable("it is too old to read pages in place")
    if page_size % _PAGE_MULTIPLE:
        raise FlashUnavailable(f"its pages are multiples of {_PAGE_MULTIPLE} tokens, and --page-size is {page_size}")
    version = 3 if module.is_fa_version_supported(3) else 2  # on the current device: not all releases take another
    return FlashFunction(name, "varlen", call, {"fa_version": version})


def _third(name: str, module: Any, device: torch.device, page_size: int) -> FlashFunction:
    if device.type == "cuda" and not _HOPPER <= torch.cuda.get_device_capability(device) < _BLACKWELL:
        raise FlashUnavailable("it is made for Hopper GPUs")
    return FlashFunction(name, "kvcache", module.flash_attn_with_kvcache, {})


def _second(name: str, module: Any, device: torch.device, page_size: int) -> FlashFunction:
    return FlashFunction(name, "gathered", module.flash_attn_varlen_func, {})


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

    def __init__(self, function: FlashFunction, config: ModelConfig, page_size: int) -> None:
        self._function = function
        self._scale = config.head_dim**-0.5
        self._page_size = page_size
        self._batch: PagedBatch | None = None
        self._portions: list[_Portion] = []

    def plan(self, batch: AttentionBatch) -> None:
        """Copy offsets, lengths and pages to the device; for the gathered form, the slots of all keys."""
        if self._function.form == "gathered":
            self._portions = [_Portion.of(batch, sequences) for sequences in _portions(batch.ends)]
        else:
            self._batch = PagedBatch.of(batch, self._page_size)

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
        if self._portions:
            attended = [self._attend_gathered(portion, q, keys, values) for portion in self._portions]
            return attended[0] if len(attended) == 1 else torch.cat(attended)
        batch, function = self._batch, self._function
        assert batch is not None, "attend before plan"
        if function.form == "varlen":
            given = {
                "q": q,
                "k": as_pages(keys, self._page_size),
                "v": as_pages(values, self._page_size),
                "seqused_k": batch.ends,
                "max_seqlen_k": batch.longest_end,
                "block_table": batch.pages,
            }
        else:
            given = {
                "q": q,
                "k_cache": as_pages(keys, self._page_size),
                "v_cache": as_pages(values, self._page_size),
                "cache_seqlens": batch.ends,
                "page_table": batch.pages,
            }
        return self._call(given, batch.query_offsets, batch.longest_query)

    def _attend_gathered(self, portion: _Portion, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        given = {
            "q": q[portion.tokens],
            "k": keys.index_select(0, portion.slots),
            "v": values.index_select(0, portion.slots),
            "cu_seqlens_k": portion.key_offsets,
            "max_seqlen_k": portion.longest_end,
        }
        return self._call(given, portion.query_offsets, portion.longest_query)

    def _call(self, given: dict[str, Any], query_offsets: Tensor, longest_query: int) -> Tensor:
        attended = self._function.call(
            **given,
            cu_seqlens_q=query_offsets,
            max_seqlen_q=longest_query,
            softmax_scale=self._scale,
            causal=True,
            **self._function.options,
        )
        result: Tensor = attended[0] if isinstance(attended, tuple) else attended
        return result.flatten(1)


@dataclass(frozen=True, slots=True)
class _Portion:
    """Neighbouring sequences whose keys are gathered together."""

    tokens: slice
    """Their rows of the flat batch."""
    query_offsets: Tensor
    """int32 [num_sequences + 1], from the portion's first row on; `key_offsets` alike."""
    slots: Tensor
    """int64: of all positions of all its sequences, one sequence after another."""
    key_offsets: Tensor
    longest_query: int
    longest_end: int

    @classmethod
    def of(cls, batch: AttentionBatch, sequences: slice) -> _Portion:
        device, offsets = batch.table.device, batch.offsets
        ends, lengths = batch.ends[sequences].astype(np.int64), batch.lengths[sequences]
        key_offsets, query_offsets = _offsets(ends), _offsets(lengths)
        positions = np.arange(key_offsets[-1]) - np.repeat(key_offsets[:-1], ends)
        rows = upload_indices(np.repeat(batch.rows[sequences], ends), device)
        first = int(offsets[sequences.start])
        return cls(
            tokens=slice(first, first + int(query_offsets[-1])),
            query_offsets=upload(query_offsets, device),
            slots=batch.table[rows, upload_indices(positions, device)].long(),
            key_offsets=upload(key_offsets, device),
            longest_query=int(lengths.max()),
            longest_end=int(ends.max()),
        )


def _portions(ends: Int32Array) -> list[slice]:
    """Sequences whose keys are at most MAX_GATHERED_TOKENS together, unless a single one has more."""
    portions, begin, gathered = [], 0, 0
    for index, end in enumerate(ends.tolist()):
        if index > begin and gathered + end > MAX_GATHERED_TOKENS:
            portions.append(slice(begin, index))
            begin, gathered = index, 0
        gathered += end
    return [*portions, slice(begin, len(ends))]


def _offsets(lengths: npt.NDArray[np.integer]) -> Int32Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
