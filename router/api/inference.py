"""`radixfleet.v1.Inference` on the router: the same service as a worker's, for the whole fleet."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable

from radixfleet import convert
from radixfleet.status import Context
from radixfleet.tracing import carried
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from router.api.prompts import Prompts
from router.dispatch.dispatcher import Dispatcher, Send
from router.dispatch.lease import Decision
from router.dispatch.link import Reply
from router.dispatch.record import RequestLog

EXECUTION_ID_KEY = "radixfleet-execution-id"


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """See the .proto."""

    def __init__(self, prompts: Prompts, dispatcher: Dispatcher, log: RequestLog) -> None:
        self._prompts = prompts
        self._dispatcher = dispatcher
        self._log = log

    async def Generate(  # type: ignore[override]  # writes to the context: see `_sender`
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream one completion."""
        request.request_id = request.request_id or secrets.token_hex(8)
        with (
            carried(context.invocation_metadata() or ()),
            self._log.follow(request.request_id, context.time_remaining) as record,
        ):
            prepared = await self._prompts.prepare(request)
            await self._dispatcher.run(prepared, record, _sender(context), context.time_remaining)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a prompt."""
        tokens = await self._prompts.tokenize(request.model, request.prompt)
        return inference_pb2.TokenizeResponse(token_ids=tokens.tolist())

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        return inference_pb2.DetokenizeResponse(text=await self._prompts.detokenize(request))

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.ModelInfo:
        """One served model."""
        await self._prompts.until_served(request.model)
        return convert.model_info_to_pb(self._prompts.model(request.model).info)


def note_decision(message: inference_pb2.RouteDecision, decision: Decision, retries: int = 0) -> None:
    """Write a decision into `message`, which is empty."""
    message.policy = decision.policy
    message.reason = decision.reason
    message.predicted_cached_tokens = decision.predicted_cached_tokens
    message.reachable_cached_tokens = decision.reachable_cached_tokens
    message.retries = retries


def _sender(context: Context) -> Send:
    """Writes replies to the client, Started with the router's decision in it.

    A write waits until the client takes the message, and is where a client that went away is noticed. It is awaited by
    the request's own task, not by gRPC around a generator, so that cancelling it runs every `finally` at once.
    """

    async def send_started(reply: Reply, decision: Decision, retries: int) -> None:
        started = reply.message.started
        note_decision(started.route, decision, retries)
        await context.send_initial_metadata(((EXECUTION_ID_KEY, started.execution_id),))
        await context.write(reply.message)

    def send(reply: Reply, decision: Decision, retries: int) -> Awaitable[None]:
        if reply.kind == "started":
            return send_started(reply, decision, retries)
        return context.write(reply.message)

    return send
