"""`radixfleet up` and a client, each of which sends its spans to a collector: one request is one trace there.

The collector is a receiver of OTLP over gRPC, as OpenTelemetry's own is, in this process; all others are processes of
their own, set up by OpenTelemetry's environment variables alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.tiny_model import tiny_model
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

START_S = 180.0
CHUNK_TOKENS = 128
CLIENT = """
import asyncio, sys
from opentelemetry import trace
from radixfleet.client import Client
from radixfleet.tracing import setup_tracing

async def main():
    async with Client(sys.argv[1], timeout_s=60) as client:
        with trace.get_tracer("a client").start_as_current_span("question"):
            await client.complete([7] * 300, max_new_tokens=5, ignore_eos=True)

setup_tracing("a-client")
asyncio.run(main())
trace.get_tracer_provider().shutdown()
"""


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    traces: dict[bytes, list[tuple[str, Span]]] = field(default_factory=lambda: defaultdict(list))
    """By trace id: service, span."""

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.traces[span.trace_id].append((names["service.name"], span))
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, dict[str, str]]]:
    """A collector, and the environment of those who send to it."""
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    to = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    try:
        yield collector, inherited | to
    finally:
        await server.stop(None)


@asynccontextmanager
async def up(run_dir: Path, environment: dict[str, str]) -> AsyncIterator[str]:
    """`radixfleet up` with one worker that serves; yields the router's address."""
    options: dict[str, Any] = {
        "--model": tiny_model(),
        "--workers": 1,
        "--run-dir": run_dir,
        "--port": 0,
        "--router-metrics-port": 0,
        "--http-port": 0,
        "--runner": "sim",
        "--chunked-prefill-size": CHUNK_TOKENS,
    }
    output = run_dir.with_suffix(".out")
    with output.open("wb") as out:
        words = [str(part) for option in options.items() for part in option]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.cli", "up", *words), stdout=out, stderr=out, env=environment
        )
    try:
        await until(
            lambda: b"try     " in output.read_bytes() or process.returncode is not None, "it is up", timeout_s=START_S
        )
        yield (run_dir / "router.address").read_text().strip()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()


async def test_one_request_is_one_trace_at_the_collector(tmp_path: Path) -> None:
    async with collecting() as (collector, environment), up(tmp_path / "run", environment) as address:
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, address, env=environment)
        assert await client.wait() == 0

        def complete() -> list[tuple[str, Span]] | None:
            whole = [spans for spans in collector.traces.values() if len(spans) == 12]
            return whole[0] if whole else None

        try:
            await until(complete, "all spans arrive")
        except AssertionError:
            names = [[(service, span.name) for service, span in spans] for spans in collector.traces.values()]
            raise AssertionError(names) from None
        found = complete()
        assert found is not None
    by_id = {span.span_id: (service, span) for service, span in found}
    seen = {
        (service, span.name, by_id[span.parent_span_id][1].name if span.parent_span_id else "")
        for service, span in found
    }
    router, worker = "radixfleet-router", "radixfleet-worker"
    assert seen == {
        ("a-client", "question", ""),
        (router, "Generate", "question"),
        (router, "prepare", "Generate"),
        (router, "route", "Generate"),
        (router, "forward", "Generate"),
        (worker, "Generate", "forward"),
        (worker, "queue", "Generate"),
        (worker, "prefill", "Generate"),
        (worker, "prefill chunk", "prefill"),
        (worker, "decode", "Generate"),
    }
    chunks = [span for _, span in found if span.name == "prefill chunk"]
    tokens = [each.value.int_value for span in chunks for each in span.attributes if each.key == "tokens"]
    assert sorted(tokens) == sorted([CHUNK_TOKENS, CHUNK_TOKENS, 300 - 2 * CHUNK_TOKENS])
    for service, span in found:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.name == "Generate":
            assert [event.name for event in span.events] == ["first token"], service
