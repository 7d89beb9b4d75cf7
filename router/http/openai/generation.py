"""POST /v1/chat/completions and its like: the way of a request through the dispatcher, and of its answer back.

Until the first token, or until a stream was silent for long, nothing is sent, so whatever fails by then has a status of
its own. A failure after that is an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from radixfleet.errors import InvalidRequest, RadixfleetError
from router.api.prompts import Prompts
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.lease import Decision
from router.dispatch.link import Reply
from router.dispatch.record import RequestLog
from router.dispatch.request import PreparedRequest
from router.http.body import parse, read_body
from router.http.context import caller_context
from router.http.errors import json_response, our_fault
from router.http.guard import count_more
from router.http.openai.answers import Part, usage_of
from router.http.openai.event_stream import EventStream
from router.http.openai.plan import Plan
from router.http.openai.requests import Sampling
from router.http.openai.translation import in_openai_names
from router.http.presence import ClientGone, client_present
from router.http.request_id import request_id_of

RequestT = TypeVar("RequestT", bound=Sampling)
Take: TypeAlias = Callable[[Sequence[Part], str, bool], Awaitable[None]]
"""Takes the pieces of a reply, the model's name, and whether it was the last reply of its prompt."""

_CALLS_OR_JSON = "sampling.grammar.lark.json"
"""What `grammar_of_few` does without."""


class Generating:
    """Carries requests to the fleet. One for the router."""

    def __init__(self, prompts: Prompts, dispatcher: Dispatcher, log: RequestLog, *, max_body_bytes: int) -> None:
        self._prompts = prompts
        self._dispatcher = dispatcher
        self._log = log
        self.max_body_bytes = max_body_bytes

    async def run(self, plan: Plan, request_id: str, take: Take) -> None:
        """All prompts of a plan, at once; the first failure ends the others. Raises RadixfleetError."""
        try:
            if len(plan.requests) == 1:
                await self._run_one(plan, 0, request_id, take)
                return
            async with asyncio.TaskGroup() as group:
                for number in range(len(plan.requests)):
                    group.create_task(self._run_one(plan, number, request_id, take))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_one(self, plan: Plan, number: int, request_id: str, take: Take) -> None:
        request, choices = plan.requests[number], plan.choices[number]
        request.request_id = request_id
        try:
            with self._log.follow(request_id, _no_deadline) as record:
                if plan.grammar_of_few is not None and await self._prompts.all_lack(request.model, _CALLS_OR_JSON):
                    request.sampling.grammar.CopyFrom(plan.grammar_of_few)
                prepared = await self._prompts.prepare(request)
                if not plan.limit:
                    self._keep_to_context(prepared)
                choices.begin(prepared, self._prompts.model(prepared.model))

                async def send(reply: Reply, _decision: Decision, _retries: int) -> None:
                    await take(choices.take(reply.message), prepared.model, reply.kind == "end")

                await self._dispatcher.run(prepared, record, send, _no_deadline)
        except InvalidRequest as error:
            named = in_openai_names(error, constraint=plan.constraint, limit=plan.limit)
            raise plan.in_client_names(named) from None

    def _keep_to_context(self, request: PreparedRequest) -> None:
        """Without a limit of the client's, a chat may go on for as long as the context does, a completion's 16 too."""
        sampling = request.message.sampling
        room = self._prompts.room(request)
        if room > 0:
            sampling.max_new_tokens = min(sampling.max_new_tokens, room) if sampling.max_new_tokens else room


class GenerateEndpoint(Generic[RequestT]):
    """An ASGI application for one path."""

    def __init__(self, generating: Generating, kind: type[RequestT], plan: Callable[[RequestT, str], Plan]) -> None:
        """`plan`: of a request and its id."""
        self._generating = generating
        self._kind = kind
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers, request_id = Headers(scope=scope), request_id_of(scope)
        body = await read_body(receive, headers, self._generating.max_body_bytes)
        plan = self._plan(parse(body, self._kind), request_id)
        del body
        count_more(scope, len(plan.requests) - 1)
        with caller_context(headers):
            if plan.is_stream:
                await self._stream(plan, request_id, receive, EventStream(send))
            else:
                answer = await self._whole(plan, request_id, receive)
                await json_response(answer)(scope, receive, send)

    async def _whole(self, plan: Plan, request_id: str, receive: Receive) -> msgspec.Struct:
        model_name = ""

        async def take(parts: Sequence[Part], model: str, _is_last: bool) -> None:  # noqa: FBT001  see Take
            nonlocal model_name
            model_name = model
            for part in parts:
                plan.whole.add(part)

        async with client_present(receive):
            await self._generating.run(plan, request_id, take)
        usage = usage_of([choices.meter for choices in plan.choices])
        return plan.whole.answer(plan.answer_id, int(time.time()), model_name, usage)

    async def _stream(self, plan: Plan, request_id: str, receive: Receive, stream: EventStream) -> None:
        async def take(parts: Sequence[Part], model: str, is_last: bool) -> None:  # noqa: FBT001  see Take
            for part in parts:
                for event in plan.streamed.add(part, model):
                    stream.put(event.data, event.name)
            if not is_last or len(plan.requests) > 1:  # the end of the response follows at once
                await stream.flush()

        try:
            async with client_present(receive), stream.kept_alive():
                await self._generating.run(plan, request_id, take)
        except ClientGone:
            raise
        except Exception as error:
            if not stream.has_begun:
                raise
            told = error if isinstance(error, RadixfleetError) else our_fault(error, plan.answer_id)
            last = plan.streamed.fail(told)
        else:
            last = plan.streamed.end()
        for event in last:
            stream.put(event.data, event.name)
        await stream.end()


def _no_deadline() -> None:
    """HTTP knows none: a client that waits no longer hangs up."""
