"""CUDA graphs on a CPU: operations are kept with the very tensors that they read and wrote, and done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.device_marks import QueuedOnCpu
from worker.core.messages import Ready
from worker.runner import computer_parts, torch_loading
from worker.runner.attention.protocol import AttentionBatch
from worker.runner.decode_graphs import Record, Replay
from worker.runner.torch_config import TorchRunnerConfig


def record(compute: Callable[[], None]) -> Replay:
    """Implements `worker.runner.decode_graphs.Record`: numbers of the host are kept as they are now, as in a graph."""
    recording = _Recording()
    with recording:
        compute()
    return recording.replay


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("what is recorded waits for a number of the device")
        self._operations.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def replay(self) -> None:
        for func, args, kwargs, results in self._operations:
            for kept, now in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if kept.data_ptr() != now.data_ptr():  # neither a view nor written in place
                    kept.copy_(now)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


class MaskedAttention:
    """Implements `RecordableAttention` in the plainest form: every sequence sees its whole table row, masked."""

    name = "masked"
    plans_on_device = True

    def plan(self, batch: AttentionBatch) -> None:
        """Each token is a sequence of its own."""
        rows = torch.from_numpy(batch.rows.repeat(batch.lengths)).long()
        positions = [torch.arange(start, end) for start, end in zip(batch.starts, batch.ends, strict=True)]
        self.plan_decodes(rows, torch.cat(positions), batch.table)

    def plan_decodes(self, rows: Tensor, positions: Tensor, table: Tensor) -> None:
        """See `RecordableAttention`."""
        self._slots = table.index_select(0, rows).long()
        self._is_hidden = torch.arange(table.shape[1]) > positions[:, None]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
        group = q.shape[1] // keys.shape[1]
        k = keys[self._slots].repeat_interleave(group, 2)
        v = values[self._slots].masked_fill(self._is_hidden[:, :, None, None], 0.0).repeat_interleave(group, 2)
        scores = torch.einsum("thd,tchd->thc", q, k) * q.shape[2] ** -0.5
        weights = scores.masked_fill(self._is_hidden[:, None], -torch.inf).softmax(-1)
        return torch.einsum("thc,tchd->thd", weights, v).flatten(1)


class ReplayedOnCpu(QueuedOnCpu):
    """A runner whose steps of decodes are recorded, by `record` unless told otherwise."""

    def __init__(self, config: TorchRunnerConfig, recorder: Record = record) -> None:
        super().__init__(config)
        self._recorder = recorder

    def load(self) -> Ready:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_loading, "recorder_for", lambda _device: self._recorder)
            patch.setattr(computer_parts, "make_attention_backend", lambda *_: MaskedAttention())
            return super().load()
