"""A worker, whatever it speaks, in the words of our own contract."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from radixfleet.text import Tokenizer
from radixfleet.v1 import inference_pb2, worker_pb2


class Unreachable(Exception):
    """A worker that is not reached by gRPC is not there, or broke off."""


class Faulty(Unreachable):
    """It was reached, and what it answered is none: a status of 500, say, or what nobody can read."""


@dataclass(frozen=True, slots=True)
class State:
    """One word of a worker on its state."""

    update: worker_pb2.StateUpdate
    tells_prefixes: bool = True
    """Its digests and deltas are the whole truth. False: it does not, or cannot yet, tell what it has cached."""


class Speaker(Protocol):
    """One worker. Methods raise AioRpcError or Unreachable, or ValueError for what no worker says, unless they say
    something else.
    """

    @property
    def dialect(self) -> str:
        """Its name: "native", "sglang", "vllm"; "openai" for engines that are reached by HTTP."""
        ...

    @property
    def lacks(self) -> frozenset[str]:
        """What it cannot do, of `needs.WORDS`; to be asked after `info`."""
        ...

    async def info(self) -> worker_pb2.WorkerInfo:
        """What the worker is. Raises TimeoutError, too: each question has its time, what is made of the answer none."""
        ...

    async def tokenizer(self) -> bytes:
        """The TokenizerSpec, as JSON, with the fingerprint that `info` gave."""
        ...

    def states(self) -> AsyncGenerator[State, None]:
        """Its state, now and whenever it changes; at least every second or so as a sign of life."""
        ...

    async def drain(self, grace_s: float | None) -> worker_pb2.DrainResponse | None:
        """Tell it to drain; returns when it is empty, or at once with None when it knows no such word."""
        ...

    async def resume(self) -> None:
        """Tell it to take requests again after a drain."""
        ...


class Archives(Protocol):
    """Where tokenizers are made of the files that engines send."""

    async def tokenizer_of(
        self, archive: bytes, *, eos_token_ids: Sequence[int], vocab_size: int
    ) -> tuple[Tokenizer, int]:
        """The tokenizer and its fingerprint. Raises ValueError for what is no archive of one."""
        ...


class Generator(Protocol):
    """A speaker of another dialect: the way of a request to it, which our own workers have in links."""

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        source: inference_pb2.Prompt | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of `Inference.Generate`. Closing it ends the request. Raises RadixfleetError, too.

        `source`: the prompt as the client wrote it, where `request` has the token ids that it came to.
        """
        ...

    async def close(self) -> None:
        """End what was begun in the background."""
        ...
