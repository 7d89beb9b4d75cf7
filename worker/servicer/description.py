"""What a worker is: the constants it was started with, and what its engine found when it loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version

from radixfleet.blocks import BLOCK_SCHEME, BLOCK_TOKENS
from radixfleet.convert import capacity_to_pb, memory_pools_to_pb, model_info_to_pb, worker_status_to_pb
from radixfleet.text import TokenizerSpec
from radixfleet.types import Incarnation, ModelInfo, WorkerId, WorkerStatus
from radixfleet.v1 import worker_pb2
from worker.core.messages import Ready


@dataclass(frozen=True, slots=True)
class Description:
    """Known before the model is loaded."""

    worker_id: WorkerId
    model: str
    """The name by which clients ask for it."""
    tokenizer: TokenizerSpec
    metrics_port: int = 0
    """Port of the Prometheus endpoint; 0: there is none."""
    fingerprint: int = field(init=False)
    """The tokenizer's fingerprint; computed once, because that hashes the whole tokenizer."""

    def __post_init__(self) -> None:
        """Derive the fingerprint."""
        object.__setattr__(self, "fingerprint", self.tokenizer.fingerprint())

    def model_info(self, ready: Ready | None) -> ModelInfo:
        """The model; what only loading tells is 0 or empty before it."""
        return ModelInfo(
            model=self.model,
            max_context_tokens=ready.max_context_tokens if ready is not None else 0,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            has_chat_template=self.tokenizer.chat_template is not None,
            tokenizer_fingerprint=self.fingerprint,
            dtype=ready.dtype if ready is not None else "",
            num_parameters=ready.num_parameters if ready is not None else 0,
        )

    def worker_info(
        self, status: WorkerStatus, incarnation: Incarnation, ready: Ready | None, advice: Sequence[str] = ()
    ) -> worker_pb2.WorkerInfo:
        """The worker; capacity and memory are absent until the model was loaded once."""
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=incarnation,
            status=worker_status_to_pb(status),
            model=model_info_to_pb(self.model_info(ready)),
            capacity=capacity_to_pb(ready.capacity) if ready is not None else None,
            memory=memory_pools_to_pb(ready.memory) if ready is not None else None,
            version=package_version(),
            block_scheme=BLOCK_SCHEME,
            block_tokens=BLOCK_TOKENS,
            advice=advice,
            metrics_port=self.metrics_port,
        )


@cache
def package_version() -> str:
    """Version of the installed radixfleet package. Finding it reads files, so it is found once."""
    return version("radixfleet")
