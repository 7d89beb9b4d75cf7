"""From the messages that routers and workers send to the values of `radixfleet.answers` that clients get."""

from __future__ import annotations

from collections.abc import Iterable

from radixfleet import convert
from radixfleet.answers import (
    Candidate,
    Delta,
    Event,
    Explanation,
    Finished,
    FleetReport,
    FleetState,
    PromptLogprobs,
    Route,
    RouteDecision,
    Started,
    TokenLogprobs,
    WorkerEntry,
    WorkerInfo,
)
from radixfleet.errors import InternalError
from radixfleet.types import (
    ExecutionId,
    Incarnation,
    WorkerId,
)
from radixfleet.v1 import fleet_pb2, inference_pb2, worker_pb2


def event(message: inference_pb2.GenerateResponse) -> Event:
    """One message of a Generate stream."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return Delta(
            token_ids=tuple(message.delta.token_ids),
            text=message.delta.text,
            index=message.index,
            logprobs=_logprobs(message.delta.logprobs),
        )
    if kind == "started":
        return _started(message.started)
    if kind == "finished":
        return _finished(message.finished, message.index)
    if kind == "prompt_logprobs":
        return PromptLogprobs(message.prompt_logprobs.start, _logprobs(message.prompt_logprobs.tokens))
    raise InternalError("the server sent an event that this version of radixfleet does not know")


def _started(message: inference_pb2.Started) -> Started:
    return Started(
        request_id=message.request_id,
        execution_id=ExecutionId(message.execution_id),
        worker_id=WorkerId(message.worker_id),
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        route=route_decision(message.route) if message.HasField("route") else None,
        counts_follow=message.counts_follow,
        is_whole=message.is_whole,
    )


def _logprobs(messages: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)))
        for message in messages
    )


def _finished(message: inference_pb2.Finished, index: int) -> Finished:
    matched = message.WhichOneof("matched")
    return Finished(
        reason=convert.finish_reason(message.reason),
        text=message.text,
        usage=convert.usage(message.usage) if message.HasField("usage") else None,
        matched_stop=message.matched_stop if matched == "matched_stop" else None,
        matched_token_id=message.matched_token_id if matched == "matched_token_id" else None,
        index=index,
    )


def route_decision(message: inference_pb2.RouteDecision) -> RouteDecision:
    """From the wire."""
    return RouteDecision(
        policy=message.policy,
        reason=message.reason,
        predicted_cached_tokens=message.predicted_cached_tokens,
        retries=message.retries,
        reachable_cached_tokens=message.reachable_cached_tokens,
    )


def worker_info(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    """From the wire."""
    return WorkerInfo(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        status=convert.worker_status(message.status),
        model=convert.model_info(message.model),
        capacity=convert.capacity(message.capacity),
        memory=convert.memory_pools(message.memory),
        version=message.version,
        block_scheme=message.block_scheme,
        block_tokens=message.block_tokens,
        advice=tuple(message.advice),
        metrics_port=message.metrics_port,
    )


def worker_entry(message: fleet_pb2.WorkerEntry) -> WorkerEntry:
    """From the wire."""
    return WorkerEntry(
        worker_id=WorkerId(message.worker_id),
        address=message.address,
        status=convert.worker_status(message.status),
        connected=message.connected,
        info=worker_info(message.info),
        load=convert.load(message.load),
        booked_requests=message.booked_requests,
        booked_prompt_tokens=message.booked_prompt_tokens,
        sketch_blocks=message.sketch_blocks,
        approximate=message.approximate,
        ineligible_reason=message.ineligible_reason,
        recent=tuple(convert.recent(recent) for recent in message.recent),
    )


def fleet_report(message: fleet_pb2.ListWorkersResponse) -> FleetReport:
    """From the wire."""
    return FleetReport(fleet_state(message.fleet), tuple(worker_entry(worker) for worker in message.workers))


def fleet_state(message: fleet_pb2.FleetState) -> FleetState:
    """From the wire."""
    return FleetState(
        uptime_s=message.uptime_s,
        policy=message.policy,
        requests_in_flight=message.requests_in_flight,
        queued_requests=message.queued_requests,
        sketch_blocks=message.sketch_blocks,
        recent=tuple(convert.recent(recent) for recent in message.recent),
        version=message.version,
    )


def explanation(message: fleet_pb2.ExplainResponse) -> Explanation:
    """From the wire."""
    return Explanation(
        policy=message.policy,
        worker_id=WorkerId(message.worker_id),
        reason=message.reason,
        prompt_tokens=message.prompt_tokens,
        prompt_blocks=message.prompt_blocks,
        candidates=tuple(_candidate(candidate) for candidate in message.candidates),
    )


def _candidate(message: fleet_pb2.Candidate) -> Candidate:
    return Candidate(
        worker_id=WorkerId(message.worker_id),
        address=message.address,
        eligible=message.eligible,
        ineligible_reason=message.ineligible_reason,
        matched_blocks=message.matched_blocks,
        matched_tokens=message.matched_tokens,
        uncached_tokens=message.uncached_tokens,
        outstanding_prompt_tokens=message.outstanding_prompt_tokens,
        running_requests=message.running_requests,
        cost=message.cost,
        approximate=message.approximate,
    )


def route(message: fleet_pb2.RouteResponse) -> Route:
    """From the wire."""
    return Route(
        worker_id=WorkerId(message.worker_id),
        address=message.address,
        lease_id=message.lease_id,
        token_ids=convert.unpack_tokens(message.token_ids),
        decision=route_decision(message.decision),
        lease_s=message.lease_s,
    )
