"""Spans that this process recorded. Only requests whose trace is marked as sampled by their client are recorded.

OpenTelemetry has one provider a process, which cannot be replaced: so it is set here once, and read by trace.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased


@cache
def _exporter() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


class ClientSpan:
    """The span of a client's program, which is current while `sampled` lasts."""

    def __init__(self, *, sampled: bool = True) -> None:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if sampled else trace.TraceFlags.DEFAULT)
        self.context = trace.SpanContext(
            secrets.randbits(128), secrets.randbits(64), is_remote=False, trace_flags=flags
        )

    @property
    def spans(self) -> list[ReadableSpan]:
        """All that were recorded below it, in the order in which they began."""
        spans = _exporter().get_finished_spans()
        return sorted(
            (span for span in spans if span.context.trace_id == self.context.trace_id), key=lambda span: span.start_time
        )

    def one(self, name: str) -> ReadableSpan:
        """The only one of this name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """Children of a span."""
        return [
            span for span in self.spans if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]


@contextmanager
def client_span(*, sampled: bool = True) -> Iterator[ClientSpan]:
    """A client's program is within a span of its own."""
    _exporter()
    span = ClientSpan(sampled=sampled)
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span.context)))
    try:
        yield span
    finally:
        context.detach(token)
