"""An Inference server whose every answer a test writes down, to see what a client does with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from radixfleet.channel import listen, make_server
from radixfleet.errors import RadixfleetError
from radixfleet.v1 import inference_pb2, inference_pb2_grpc

SERVICE = "radixfleet.v1.Inference"


class Silence:
    """Send nothing more until the client goes away."""


Act = inference_pb2.GenerateResponse | RadixfleetError | Silence


def started(**fields: object) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(started=inference_pb2.Started(worker_id="w", **fields))  # type: ignore[arg-type]


def delta(
    *token_ids: int, text: str = "", index: int = 0, logprobs: Sequence[inference_pb2.TokenLogprobs] = ()
) -> inference_pb2.GenerateResponse:
    message = inference_pb2.Delta(token_ids=token_ids, text=text, logprobs=logprobs)
    return inference_pb2.GenerateResponse(delta=message, index=index)


def finished(text: str = "", *, index: int = 0, **fields: object) -> inference_pb2.GenerateResponse:
    """With usage, so the last message, unless `usage` is None."""
    values = {"usage": inference_pb2.Usage()} | fields
    message = inference_pb2.Finished(text=text, reason=inference_pb2.FINISH_REASON_STOP, **values)  # type: ignore[arg-type]
    return inference_pb2.GenerateResponse(finished=message, index=index)


def told(logprob: float, *top: tuple[int, float]) -> inference_pb2.TokenLogprobs:
    """Log probabilities of one token."""
    ids, logprobs = [token_id for token_id, _ in top], [value for _, value in top]
    return inference_pb2.TokenLogprobs(logprob=logprob, top_token_ids=ids, top_logprobs=logprobs)


def prompt_logprobs(start: int, *tokens: inference_pb2.TokenLogprobs) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(prompt_logprobs=inference_pb2.PromptLogprobs(start=start, tokens=tokens))


@dataclass
class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Plays one script a Generate call, the last again when they run out. Unary calls first raise `unary_errors`."""

    scripts: Sequence[Sequence[Act]] = ()
    unary_errors: list[RadixfleetError] = field(default_factory=list)
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    timeouts_s: list[float | None] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    """How each Generate call ended: "done", "failed" or "cancelled"."""
    received: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a Generate call has come."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a Generate call has ended."""

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        self.requests.append(request)
        self.timeouts_s.append(context.time_remaining())
        self.received.set()
        outcome = "cancelled"
        try:
            for act in self.scripts[min(len(self.requests), len(self.scripts)) - 1]:
                if isinstance(act, RadixfleetError):
                    outcome = "failed"
                    raise act
                if isinstance(act, Silence):
                    await asyncio.Event().wait()
                yield act
            outcome = "done"
        finally:
            self.outcomes.append(outcome)
            self.ended.set()

    async def Tokenize(self, request, context):  # type: ignore[no-untyped-def]
        if self.unary_errors:
            raise self.unary_errors.pop(0)
        return inference_pb2.TokenizeResponse(token_ids=list(request.prompt.text.encode()))

    async def Detokenize(self, request, context):  # type: ignore[no-untyped-def]
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())


@asynccontextmanager
async def serving(servicer: inference_pb2_grpc.InferenceServicer, port: int = 0) -> AsyncIterator[str]:
    """Serve on a port of this machine (0: a free one); gives host:port."""
    server, health = await make_server([SERVICE])
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = listen(server, "127.0.0.1", port)
    await server.start()
    await health.set(serving=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
