"""The Inference service of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import grpc.aio

from radixfleet import convert
from radixfleet.clock import Clock
from radixfleet.errors import unknown_model
from radixfleet.status import Context
from radixfleet.tracing import carried
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from worker.metrics import Outcome, WorkerMetrics
from worker.servicer.description import Description
from worker.servicer.generation import Generation, outcome_of
from worker.servicer.intake import Intake
from worker.servicer.link import TimeRemaining
from worker.servicer.requests import RunningRequests

EXECUTION_ID_HEADER = "radixfleet-execution-id"
_DEADLINE_SLACK_S = 0.1
"""A client whose deadline passes hangs up a little before the server's clock says so."""


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Methods raise RadixfleetErrors; the server's interceptor makes statuses of them."""

    def __init__(
        self,
        description: Description,
        intake: Intake,
        requests: RunningRequests,
        metrics: WorkerMetrics,
        clock: Clock,
    ) -> None:
        self._description = description
        self._intake = intake
        self._requests = requests
        self._metrics = metrics
        self._clock = clock

    async def Generate(  # type: ignore[override]  # writes to the context
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    ) -> None:
        """Started, Delta, ..., Finished."""
        metadata = context.invocation_metadata() or ()
        async with self.running(request, context.time_remaining, metadata) as generation:
            await context.send_initial_metadata(((EXECUTION_ID_HEADER, generation.identity.execution_id),))
            async for response in generation.responses():
                await context.write(response)

    @asynccontextmanager
    async def running(
        self,
        request: inference_pb2.GenerateRequest,
        time_remaining: TimeRemaining,
        metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> AsyncIterator[Generation]:
        """A request that was submitted; leaving the block ends it. Raises RadixfleetError.

        `metadata`: of its call; a trace is below the context that they carry, or else the current one.
        """
        with carried(metadata):
            generation = await self._start(request, time_remaining)
        try:
            yield generation
        finally:
            self._requests.end(generation, _why_gone(time_remaining()))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """The ids that Generate would compute on."""
        self._require_model(request.model)
        return await self._intake.tokenize(request)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """The text of ids."""
        self._require_model(request.model)
        return await self._intake.detokenize(request)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.ModelInfo:
        """The model; UNAVAILABLE while its limits are not known yet."""
        self._require_model(request.model)
        return convert.model_info_to_pb(self._description.model_info(self._requests.require_loaded()))

    async def _start(self, request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining) -> Generation:
        """Validate, tokenize, submit. What fails here has an outcome, too."""
        arrived_s = self._clock.now()
        try:
            convert.check_names(request)
            self._require_model(request.model)
            prepared = await self._intake.prepare(request, self._requests.require_serving())
            return self._requests.start(request, prepared, arrived_s=arrived_s)
        except asyncio.CancelledError:
            self._metrics.ended(_why_gone(time_remaining()), self._clock.now() - arrived_s)
            raise
        except Exception as error:
            self._metrics.ended(outcome_of(error), self._clock.now() - arrived_s)
            raise

    def _require_model(self, model: str) -> None:
        if model and model != self._description.model:
            raise unknown_model(model, [self._description.model])


def _why_gone(remaining_s: float | None) -> Outcome:
    """Why a client reads no further."""
    return Outcome.DEADLINE if remaining_s is not None and remaining_s <= _DEADLINE_SLACK_S else Outcome.CANCELLED
