"""A client for a router or a worker: streaming, deadline, cancel and retry.

    async with Client("127.0.0.1:7070") as client:
        async for event in client.generate([{"role": "user", "content": "Hello"}], max_new_tokens=64):
            ...

- Deadline: `timeout_s` holds for all tries together.
- Cancel: leaving the loop (break, an exception, cancelling the task) ends the request on the server.
- Retry: only before the first token, so no text is ever repeated; see `RetryPolicy`. A server that has answered and is
  gone is waited for, as one that is started again takes seconds; where nothing ever answered, that is said at once.
Errors are those of `radixfleet.errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from random import Random
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc.aio
import numpy as np
from google.protobuf.message import Message

from radixfleet import convert, heard, watched_fleet
from radixfleet.address import server_address
from radixfleet.answers import (
    Completion,
    Delta,
    DrainOutcome,
    Event,
    Explanation,
    Finished,
    FleetReport,
    Route,
    Started,
    WorkerEntry,
    WorkerInfo,
)
from radixfleet.cancellation import is_cancelled
from radixfleet.channel import open_channel
from radixfleet.clock import Clock, MonotonicClock
from radixfleet.collector import Collector
from radixfleet.compose import PromptInput, RequestOptions, generate_request, prompt_to_pb, token_array, utf8
from radixfleet.deadline import Deadline
from radixfleet.endpoint import Endpoint, as_endpoint
from radixfleet.errors import Cancelled, DeadlineExceeded, InternalError, RadixfleetError, Unreachable
from radixfleet.retry import Contact, RetryPolicy, Tries
from radixfleet.route_asker import NotSpoken, RouteAsker
from radixfleet.status import error_from_rpc, stream_error
from radixfleet.tracing import headers
from radixfleet.types import ModelInfo, TokenArray
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

T = TypeVar("T")

_UNKNOWN_S = 60.0
"""A router that does not know `Fleet.RouteStream` is asked again after this time: there may be another one by then."""


class Client:
    """One connection to a router or a worker. Use as an async context manager, from one event loop."""

    def __init__(
        self,
        target: str | Endpoint,
        *,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        """`target`: host:port (a host alone: port 7070), or an Endpoint where TLS or a key is needed.

        `timeout_s`: for calls that are given none; None waits forever. Raises ValueError for what is no
        address, UnusableFile when the endpoint's certificates cannot be read, and RuntimeError where no event loop
        runs, as calls do on another loop.
        """
        self._loop = asyncio.get_running_loop()
        endpoint = as_endpoint(target)
        self._address = server_address(endpoint.address)
        self._channel = open_channel(replace(endpoint, address=self._address))
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._fleet = fleet_pb2_grpc.FleetStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._clock = clock or MonotonicClock()
        self._closed = asyncio.Event()
        self._contact = Contact()
        self._asker = RouteAsker(self._fleet)
        self._calls_until_s = float("-inf")
        """Until when routes are asked by calls."""
        self._random = random or Random()  # noqa: S311  spreads retries, guards nothing

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what is running (it raises Cancelled) and close the connection."""
        self._closed.set()
        await self._asker.close()
        await self._channel.close(None)

    # Inference: a router or a worker answers.

    async def generate(
        self, prompt: PromptInput, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Event, None]:
        """The events of one generation: one Started, any number of Delta, one Finished with usage.

        With n > 1 the Deltas of all completions come mixed, and each has a Finished, of which the last has usage. With
        prompt_logprobs, PromptLogprobs follow Started.

        Started is held back until something follows it, because until then the request may be tried again. The request
        ends on the server when the iterator is closed or dropped. Raises RadixfleetError.
        """
        request = generate_request(prompt, options)
        deadline = self._deadline(timeout_s)
        tries = self._tries()
        while True:
            begun = False
            try:
                async with aclosing(self._try_generate(request, deadline)) as events:
                    async for event in events:
                        begun = True
                        self._contact.has_answered = True
                        yield event
            except RadixfleetError as error:
                if begun:
                    raise
                await self._wait_for_retry(error, tries, deadline)
            else:
                return

    async def _try_generate(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline
    ) -> AsyncGenerator[Event, None]:
        timeout_s = self._for_try_s(deadline)
        call = self._inference.Generate(request, timeout=timeout_s, metadata=tuple(headers().items()))
        held: list[Event] = []
        finished: Finished | None = None
        delivered_tokens: int | None = None
        try:
            async for message in call:
                event = heard.event(message)
                if isinstance(event, Finished) and event.usage is not None:
                    finished = event  # goes out with the status: a caller that leaves then has nothing left to cancel
                    continue
                held.append(event)
                if not isinstance(event, Started):
                    delivered_tokens = (delivered_tokens or 0) + len(message.delta.token_ids)
                    for item in held:
                        yield item
                    held.clear()
        except grpc.aio.AioRpcError as error:
            told = stream_error(error, self._address, delivered_tokens)
            raise deadline.named(told, delivered_tokens) from error
        except asyncio.CancelledError:
            self._check_open()
            raise
        finally:
            call.cancel()
        if finished is None:
            raise InternalError("the stream ended without its Finished message: the answer is not whole")
        for item in (*held, finished):
            yield item

    async def complete(
        self,
        prompt: PromptInput,
        *,
        timeout_s: float | None = None,
        on_text: Callable[[str], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """One whole generation. The rest is as in `generate`.

        `on_text` is called with each piece of text as it comes; with n > 1, of the first completion alone.
        """
        begun_s = self._clock.now()
        first_s: float | None = None
        collector = Collector()
        async for event in self.generate(prompt, timeout_s=timeout_s, **options):
            collector.take(event)
            if isinstance(event, Delta | Finished):
                first_s = self._clock.now() if first_s is None else first_s
                if on_text is not None and event.index == 0:
                    on_text(event.text)
        now_s = self._clock.now()
        return collector.completion(ttft_s=(now_s if first_s is None else first_s) - begun_s, total_s=now_s - begun_s)

    async def tokenize(self, prompt: PromptInput, *, model: str = "", timeout_s: float | None = None) -> TokenArray:
        """The token ids that `generate` would compute on."""
        request = inference_pb2.TokenizeRequest(model=utf8(model, "model"), prompt=prompt_to_pb(prompt))
        response = await self._call(self._inference.Tokenize, request, timeout_s)
        return np.array(response.token_ids, dtype=np.uint32)

    async def detokenize(
        self,
        token_ids: Sequence[int] | TokenArray,
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = inference_pb2.DetokenizeRequest(
            model=utf8(model, "model"),
            token_ids=token_array(token_ids, "token_ids").tolist(),
            skip_special_tokens=skip_special_tokens,
        )
        response: inference_pb2.DetokenizeResponse = await self._call(self._inference.Detokenize, request, timeout_s)
        return response.text

    async def model_info(self, model: str = "", *, timeout_s: float | None = None) -> ModelInfo:
        """One served model; "" for the only one."""
        request = inference_pb2.GetModelInfoRequest(model=utf8(model, "model"))
        return convert.model_info(await self._call(self._inference.GetModelInfo, request, timeout_s))

    # Fleet: a router answers.

    async def route(
        self, prompt: PromptInput, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Route:
        """Books a worker for a request that the caller sends there itself, with the answer's lease_id and token_ids.

        All routes of a client are asked over one stream, where the router knows that, and many that are asked at once
        cost it little more than one. Leases end with a client that dies, but not with one that is closed.
        """
        request = generate_request(prompt, options)
        response = await self._persist(lambda left_s: self._ask(request, left_s), timeout_s)
        if not response.HasField("token_ids"):
            response.token_ids.CopyFrom(request.prompt.token_ids)
        return heard.route(response)

    async def _ask(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> fleet_pb2.RouteResponse:
        if self._clock.now() >= self._calls_until_s:
            try:
                return await self._asker.route(request, timeout_s)
            except NotSpoken:
                self._calls_until_s = self._clock.now() + _UNKNOWN_S
        routed: fleet_pb2.RouteResponse = await _called(
            self._fleet.Route, fleet_pb2.RouteRequest(request=request), timeout_s
        )
        return routed

    def end_lease(self, lease_id: str, *, cached_tokens: int | None = None) -> None:
        """Tell the router that the request of a route has ended, or, without `cached_tokens`, that it is never sent.

        Need not be called: the worker tells the end of a request, a moment later, and a lease that nobody uses expires.
        Does nothing where routes are asked by calls.
        """
        self._asker.end_lease(lease_id, cached_tokens)

    async def explain(
        self, prompt: PromptInput, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Explanation:
        """Where the prompt would go now, and why. Changes nothing."""
        request = fleet_pb2.ExplainRequest(request=generate_request(prompt, options))
        return heard.explanation(await self._call(self._fleet.Explain, request, timeout_s))

    async def list_workers(self, *, timeout_s: float | None = None) -> list[WorkerEntry]:
        """Every worker that the router knows."""
        response = await self._call(self._fleet.ListWorkers, fleet_pb2.ListWorkersRequest(), timeout_s)
        return [heard.worker_entry(worker) for worker in response.workers]

    async def fleet(self, *, timeout_s: float | None = None) -> FleetReport:
        """The fleet and every worker in it, with what happened lately."""
        response = await self._call(self._fleet.ListWorkers, fleet_pb2.ListWorkersRequest(), timeout_s)
        return heard.fleet_report(response)

    async def watch_fleet(self, *, timeout_s: float | None = None) -> AsyncGenerator[FleetReport, None]:
        """What `fleet` gives, at once and whenever something in it is different: at most every half second.

        A router whose connection breaks is tried again, as for other calls, and the fleet of the one that is there then
        follows. Ends with an error alone: Unavailable when the router stops, is not back in time or hangs,
        DeadlineExceeded after `timeout_s` (the client's own, which is for answers, does not count here). Raises
        RadixfleetError.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        tries, begun = self._tries(), False
        while True:
            left_s = self._for_try_s(deadline)
            try:
                call = self._fleet.WatchFleet(fleet_pb2.WatchFleetRequest(), timeout=left_s)
                async with aclosing(watched_fleet.reports(call, self._address)) as reports:
                    async for report in reports:
                        begun = self._contact.has_answered = True
                        tries = self._tries()
                        yield report
            except Unreachable as error:
                lost = Unreachable(f"the connection to the router at {self._address} was lost: does it still run?")
                await self._wait_for_retry(lost if begun else error, tries, deadline)
            except DeadlineExceeded as error:
                if begun and timeout_s is not None:
                    text = f"the fleet was watched for {timeout_s:g} s, as asked (timeout_s)"
                    raise DeadlineExceeded(text) from error
                raise deadline.named(error) from error.__cause__
            except asyncio.CancelledError:
                self._check_open()
                raise

    async def register(self, address: str, *, timeout_s: float | None = None) -> bool:
        """Tell the router of a worker at host:port. False: it was known already."""
        request = fleet_pb2.RegisterRequest(address=utf8(address, "address"))
        response: fleet_pb2.RegisterResponse = await self._call(self._fleet.Register, request, timeout_s)
        return response.added

    async def drain(
        self, worker_id: str, *, grace_s: float | None = None, timeout_s: float | None = None
    ) -> DrainOutcome:
        """Send a worker nothing new, and wait until it is empty; what runs after `grace_s` seconds is aborted.

        Ends early, and says so, when somebody resumes the worker meanwhile.
        """
        request = fleet_pb2.DrainWorkerRequest(worker_id=utf8(worker_id, "worker_id"), grace_s=grace_s)
        response = await self._call(self._fleet.Drain, request, timeout_s)
        return DrainOutcome(response.finished_requests, response.aborted_requests, response.resumed)

    async def resume(self, worker_id: str, *, timeout_s: float | None = None) -> None:
        """Put a drained, or draining, worker back to work."""
        request = fleet_pb2.ResumeWorkerRequest(worker_id=utf8(worker_id, "worker_id"))
        await self._call(self._fleet.Resume, request, timeout_s)

    async def remove(self, worker_id: str, *, timeout_s: float | None = None) -> None:
        """Make the router forget a worker at once."""
        request = fleet_pb2.RemoveRequest(worker_id=utf8(worker_id, "worker_id"))
        await self._call(self._fleet.Remove, request, timeout_s)

    # Worker: a worker answers.

    async def worker_info(self, *, timeout_s: float | None = None) -> WorkerInfo:
        """Identity, model, capacity and memory of the worker."""
        return heard.worker_info(await self._call(self._worker.GetInfo, worker_pb2.GetInfoRequest(), timeout_s))

    async def flush_cache(self, *, timeout_s: float | None = None) -> int:
        """Drop every cached prefix that no request is using; returns how many tokens that were."""
        response: worker_pb2.FlushCacheResponse = await self._call(
            self._worker.FlushCache, worker_pb2.FlushCacheRequest(), timeout_s
        )
        return response.flushed_tokens

    async def abort(self, execution_id: str, *, timeout_s: float | None = None) -> bool:
        """End one request. False: it is not running."""
        request = worker_pb2.AbortRequest(execution_id=utf8(execution_id, "execution_id"))
        response: worker_pb2.AbortResponse = await self._call(self._worker.Abort, request, timeout_s)
        return response.found

    async def _call(self, method: Callable[..., Any], request: Message, timeout_s: float | None) -> Any:
        """One unary call, tried again as the policy says: all of them may be repeated without harm."""
        return await self._persist(lambda left_s: _called(method, request, left_s), timeout_s)

    async def _persist(self, attempt: Callable[[float | None], Awaitable[T]], timeout_s: float | None) -> T:
        """Try until it works, or the policy says that this was all. `attempt` is given the seconds that are left."""
        deadline = self._deadline(timeout_s)
        tries = self._tries()
        while True:
            left_s = self._for_try_s(deadline)
            try:
                answer = await attempt(left_s)
            except RadixfleetError as error:
                await self._wait_for_retry(deadline.named(error), tries, deadline)
            except asyncio.CancelledError:
                self._check_open()
                raise
            else:
                self._contact.has_answered = True
                return answer

    def _for_try_s(self, deadline: Deadline) -> float | None:
        """What one more try may take. Raises Cancelled when the client was closed, DeadlineExceeded."""
        if asyncio.get_running_loop() is not self._loop:  # gRPC would speak of tasks and futures
            raise RuntimeError("the Client was made on another event loop: each asyncio.run, and thread, needs its own")
        self._check_open()
        return deadline.for_try_s(self._clock)

    def _check_open(self) -> None:
        """Raises Cancelled when the client was closed."""
        if self._closed.is_set() and not is_cancelled():
            raise Cancelled("the client was closed")

    async def _wait_for_retry(self, error: RadixfleetError, tries: Tries, deadline: Deadline) -> None:
        """Return when the next try is due, or the client is closed; raise `error` when there is to be none."""
        delay_s = tries.delay_s(error, deadline.left_s(self._clock))
        if delay_s is None:
            raise error
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._closed.wait()

    def _tries(self) -> Tries:
        return Tries(self._retry, self._contact, self._clock, self._random)

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s, self._clock)


async def _called(method: Callable[..., Any], request: Message, timeout_s: float | None) -> Any:
    """One call. Raises RadixfleetError."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
