"""FlashAttention's packages as far as they are called, computing in the plainest form on a CPU.

Signatures and what they refuse are those of the packages; each call is noted.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class FakeFlash:
    """Modules by name, for `find_flash(load=...)`."""

    def __init__(self, *names: str, version: int = 3) -> None:
        self.calls: list[dict[str, Any]] = []
        self._version = version
        makers: dict[str, Callable[[], SimpleNamespace]] = {
            "vllm.vllm_flash_attn": self._vllm,
            "vllm_flash_attn": self._vllm,
            "flash_attn_interface": self._third,
            "flash_attn": self._second,
        }
        self._modules = {name: makers[name]() for name in names}

    def load(self, name: str) -> Any:
        """As importlib.import_module."""
        if name not in self._modules:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return self._modules[name]

    def _vllm(self) -> SimpleNamespace:
        def flash_attn_varlen_func(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            max_seqlen_q: int,
            cu_seqlens_q: Tensor,
            max_seqlen_k: int,
            cu_seqlens_k: Tensor | None = None,
            seqused_k: Tensor | None = None,
            softmax_scale: float | None = None,
            causal: bool = False,
            block_table: Tensor | None = None,
            fa_version: int = 2,
        ) -> Tensor:
            assert cu_seqlens_k is None
            assert seqused_k is not None
            assert block_table is not None
            assert k.shape[1] % 16 == 0, "pages are multiples of 16"
            self._check(q, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table)
            self.calls.append({"fa_version": fa_version, "block_table": block_table})
            assert causal
            return self._paged(q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale)

        return SimpleNamespace(
            flash_attn_varlen_func=flash_attn_varlen_func,
            is_fa_version_supported=lambda fa_version: fa_version <= self._version,
        )

    def _third(self) -> SimpleNamespace:
        def flash_attn_with_kvcache(
            q: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            cache_seqlens: Tensor | None = None,
            page_table: Tensor | None = None,
            cu_seqlens_q: Tensor | None = None,
            max_seqlen_q: int | None = None,
            softmax_scale: float | None = None,
            causal: bool = False,
        ) -> Tensor:
            assert cache_seqlens is not None
            assert page_table is not None
            assert cu_seqlens_q is not None
            assert max_seqlen_q is not None
            self._check(q, cu_seqlens_q, cache_seqlens, max_seqlen_q, int(cache_seqlens.max()), page_table)
            self.calls.append({"block_table": page_table})
            assert causal
            return self._paged(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale)

        return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)

    def _second(self) -> SimpleNamespace:
        def flash_attn_varlen_func(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cu_seqlens_q: Tensor,
            cu_seqlens_k: Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            softmax_scale: float | None = None,
            causal: bool = False,
        ) -> Tensor:
            ends = cu_seqlens_k.diff()
            assert len(k) == len(v) == int(cu_seqlens_k[-1])
            self._check(q, cu_seqlens_q, ends.contiguous(), max_seqlen_q, max_seqlen_k, None)
            self.calls.append({"cu_seqlens_k": cu_seqlens_k})
            assert causal
            keys = [k[begin : begin + end] for begin, end in zip(cu_seqlens_k[:-1], ends, strict=True)]
            values = [v[begin : begin + end] for begin, end in zip(cu_seqlens_k[:-1], ends, strict=True)]
            return _attend_each(q, cu_seqlens_q, keys, values, softmax_scale)

        return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)

    def _check(
        self, q: Tensor, offsets: Tensor, ends: Tensor, longest_query: int, longest_end: int, pages: Tensor | None
    ) -> None:
        assert q.stride(2) == 1
        assert offsets.dtype == ends.dtype == torch.int32
        assert offsets.is_contiguous()
        assert ends.is_contiguous()
        assert offsets[0] == 0
        assert offsets[-1] == len(q)
        lengths = offsets.diff()
        assert longest_query == lengths.max()
        assert longest_end >= ends.max()  # more where the lengths are known on the device alone
        assert (lengths >= 1).all()
        assert (ends >= lengths).all()
        if pages is not None:
            assert pages.dtype == torch.int32
            assert pages.stride(1) == 1
            assert len(pages) == len(ends)

    def _paged(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, ends: Tensor, pages: Tensor, scale: float | None
    ) -> Tensor:
        keys = [k[row.long()].flatten(0, 1)[:end] for row, end in zip(pages, ends, strict=True)]
        values = [v[row.long()].flatten(0, 1)[:end] for row, end in zip(pages, ends, strict=True)]
        return _attend_each(q, offsets, keys, values, scale)


def _attend_each(q: Tensor, offsets: Tensor, keys: list[Tensor], values: list[Tensor], scale: float | None) -> Tensor:
    out = torch.empty_like(q)
    for sequence, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(int(offsets[sequence]), int(offsets[sequence + 1]))
        query, group = q[rows].double(), q.shape[1] // k.shape[1]
        k, v = (each.double().repeat_interleave(group, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        length, end = scores.shape[1:]
        hidden = torch.ones(length, end, dtype=torch.bool).triu(end - length + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
