"""Calls to Inference.Generate, and what came back, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from radixfleet.convert import pack_tokens
from radixfleet.errors import RadixfleetError
from radixfleet.status import error_from_rpc
from radixfleet.v1 import inference_pb2, inference_pb2_grpc


def request(prompt: str | Sequence[int], **fields: object) -> inference_pb2.GenerateRequest:
    """A greedy request for text or token ids. `fields`: of GenerateRequest, or of SamplingParams."""
    own = {
        name: fields.pop(name)
        for name in list(fields)
        if name in inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    }
    if isinstance(prompt, str):
        form = inference_pb2.Prompt(text=prompt)
    else:
        form = inference_pb2.Prompt(token_ids=pack_tokens(np.array(prompt, dtype=np.uint32)))
    sampling = inference_pb2.SamplingParams(**({"temperature": 0.0} | fields))
    return inference_pb2.GenerateRequest(prompt=form, sampling=sampling, **own)


@dataclass
class Answer:
    """One whole stream, its order checked."""

    started: inference_pb2.Started
    deltas: list[inference_pb2.Delta] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None

    @property
    def token_ids(self) -> list[int]:
        """All tokens."""
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def text(self) -> str:
        """All text, the last message's included."""
        return "".join(delta.text for delta in self.deltas) + (self.finished.text if self.finished else "")

    @property
    def reason(self) -> str:
        """STOP, LENGTH or ABORT."""
        assert self.finished is not None
        return inference_pb2.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_")


async def collect(call: AsyncIterator[inference_pb2.GenerateResponse]) -> Answer:
    """Read a stream to its end. AssertionError unless it is one Started, any number of Delta, one Finished."""
    answer: Answer | None = None
    async for response in call:
        kind = response.WhichOneof("event")
        if answer is None:
            assert kind == "started"
            answer = Answer(response.started)
            continue
        assert answer.finished is None, "nothing follows Finished"
        if kind == "delta":
            answer.deltas.append(response.delta)
        else:
            assert kind == "finished"
            answer.finished = response.finished
    assert answer is not None
    assert answer.finished is not None, "the stream ends with Finished"
    return answer


async def read_failure(call: AsyncIterator[inference_pb2.GenerateResponse]) -> tuple[list[str], RadixfleetError]:
    """Read a stream that ends with an error; returns the kinds of messages that came before, and the error."""
    kinds: list[str] = []
    try:
        async for response in call:
            kinds.append(str(response.WhichOneof("event")))  # noqa: PERF401  kept when the stream breaks off
    except grpc.aio.AioRpcError as error:
        return kinds, error_from_rpc(error)
    raise AssertionError(f"the stream ended well: {kinds}")


async def generate(stub: inference_pb2_grpc.InferenceStub, prompt: str | Sequence[int], **fields: object) -> Answer:
    """Send a request and read its answer."""
    return await collect(stub.Generate(request(prompt, **fields)))
