"""Traces by OpenTelemetry, from the client through the router to the steps of a worker's engine.

    client    its current span                                  -> traceparent in the call's metadata
    router    Generate: prepare, route (queue), forward         -> traceparent in the call, or in the link's frame
    worker    Generate: queue, prefill (prefill chunk ...), decode

The context travels as W3C's traceparent and tracestate, whether or not anything is recorded on the way. Only the API of
OpenTelemetry is needed for that. Recording needs its SDK, the extra `traces`, and is switched on by the environment
variables that OpenTelemetry defines (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_EXPORTER, OTEL_TRACES_SAMPLER, ...).
What is not recorded costs a few microseconds a request, and nothing a token.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["UNTRACED", "Attribute", "SpanKind", "Trace", "TracesUnavailable", "carried", "headers", "setup_tracing"]

Attribute: TypeAlias = str | int | float | bool

_PROPAGATOR = TraceContextTextMapPropagator()
_FIELDS = _PROPAGATOR.fields
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACER = trace.get_tracer("radixfleet")
"""A proxy: spans go to the provider that is set when they begin."""
_UNCHANGED = nullcontext()


class TracesUnavailable(OSError):
    """The environment asks for traces that this installation cannot send. The message says what to do."""


class Trace:
    """One span and what is to be known of it. All times are seconds of the process's own clock.

    Of a trace that is not recorded every method returns at once, but its context goes on to others.
    """

    def __init__(self, span: Span, offset_ns: int) -> None:
        self._span = span
        self._offset_ns = offset_ns
        """Added to a time of our clock, gives Unix time."""
        self.is_recorded = span.is_recording()
        self._is_valid = span.get_span_context().is_valid

    @classmethod
    def begin(cls, name: str, began_s: float, now_s: float, kind: SpanKind = SpanKind.SERVER) -> Trace:
        """A span below the current context, begun at `began_s` of a clock that shows `now_s`."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # nobody records in this process
            return UNTRACED
        offset_ns = time.time_ns() - round(now_s * 1e9)
        return cls(_TRACER.start_span(name, kind=kind, start_time=offset_ns + round(began_s * 1e9)), offset_ns)

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; for logs."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def child(self, name: str, began_s: float, kind: SpanKind = SpanKind.INTERNAL) -> Trace:
        """A span below this one, which the caller must end."""
        if not self.is_recorded:
            return self
        parent = trace.set_span_in_context(self._span)
        span = _TRACER.start_span(name, parent, kind, start_time=self._unix_ns(began_s))
        return Trace(span, self._offset_ns)

    def span(self, name: str, began_s: float, ended_s: float, **attributes: Attribute) -> None:
        """A span below this one that is over."""
        if self.is_recorded:
            child = self.child(name, began_s)
            child.note(**attributes)
            child.end(ended_s)

    def event(self, name: str, at_s: float) -> None:
        """Add an event to the span."""
        if self.is_recorded:
            self._span.add_event(name, timestamp=self._unix_ns(at_s))

    def note(self, **attributes: Attribute) -> None:
        """Set attributes; two underscores in a name stand for a dot."""
        if self.is_recorded:
            self._span.set_attributes({name.replace("__", "."): value for name, value in attributes.items()})

    def end(self, at_s: float, error: str = "") -> None:
        """End the span. `error`: why what it stands for failed; empty when it did not."""
        if self.is_recorded:
            if error:
                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end(self._unix_ns(at_s))

    def current(self) -> AbstractContextManager[None]:
        """While the block lasts, calls to others carry this span as their parent."""
        return _attached(trace.set_span_in_context(self._span)) if self._is_valid else _UNCHANGED

    def _unix_ns(self, at_s: float) -> int:
        return self._offset_ns + round(at_s * 1e9)


UNTRACED = Trace(trace.INVALID_SPAN, 0)


def carried(metadata: Iterable[tuple[str, str | bytes]]) -> AbstractContextManager[None]:
    """While the block lasts, the current context is the one that a call's metadata carry, if they do."""
    carrier = {name: value for name, value in metadata if name in _FIELDS and value}
    return _attached(_PROPAGATOR.extract(carrier)) if carrier else _UNCHANGED


def headers() -> Mapping[str, str]:
    """The current context as it is carried to others: traceparent and, where there is one, tracestate."""
    carrier: dict[str, str] = {}
    if trace.get_current_span() is not trace.INVALID_SPAN:
        _PROPAGATOR.inject(carrier)
    return carrier


def setup_tracing(service: str) -> None:
    """Record and send traces if the environment says so; `service` is their name unless OTEL_SERVICE_NAME gives one.

    Raises TracesUnavailable. For the main program, once.
    """
    exporter = _exporter_asked_for()
    if exporter == "none":
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
    except ImportError as error:
        raise TracesUnavailable(
            f"the environment asks for traces ({exporter}), which need: pip install 'radixfleet[traces]' ({error})"
        ) from error
    makers: Mapping[str, Callable[[], SpanExporter]] = {
        "otlp": OTLPSpanExporter,
        "console": lambda: ConsoleSpanExporter(out=sys.stderr),
    }
    if exporter not in makers:
        raise TracesUnavailable(f"OTEL_TRACES_EXPORTER must be one of otlp, console, none, got {exporter!r}")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    if exporter == "otlp" and protocol != "grpc":
        raise TracesUnavailable(f"OTEL_EXPORTER_OTLP_PROTOCOL must be grpc, got {protocol!r}")
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(name))
    provider.add_span_processor(BatchSpanProcessor(makers[exporter]()))
    trace.set_tracer_provider(provider)


def _exporter_asked_for() -> str:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return "none"
    default = "otlp" if any(os.environ.get(name) for name in _ENDPOINTS) else "none"
    return os.environ.get("OTEL_TRACES_EXPORTER") or default


@contextmanager
def _attached(context: contexts.Context) -> Iterator[None]:
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)
