"""Contexts that travel, and what the environment may ask for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace

from radixfleet.tracing import UNTRACED, Trace, TracesUnavailable, carried, headers, setup_tracing
from tests.support.spans import client_span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
VARIABLES = ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_context_is_carried_as_w3c_says() -> None:
    metadata = [("user-agent", "x"), ("traceparent", PARENT), ("tracestate", "vendor=1"), ("some-bin", b"\x00")]
    with carried(metadata):
        assert headers() == {"traceparent": PARENT, "tracestate": "vendor=1"}
    assert headers() == {}


@pytest.mark.parametrize("value", ["", "garbage", "00-0-0-00"])
def test_a_context_that_is_none_changes_nothing(value: str) -> None:
    with carried([("traceparent", value)]):
        assert headers() == {}


def test_a_trace_that_is_not_recorded_still_goes_on() -> None:
    with client_span():
        pass  # there is a provider now
    with carried([("traceparent", PARENT.removesuffix("01") + "00")]):
        begun = Trace.begin("Generate", 1.0, 2.0)
        assert not begun.is_recorded
        assert begun.child("below", 1.0) is begun
        with begun.current():
            assert headers()["traceparent"].split("-")[1] == PARENT.split("-")[1]
    UNTRACED.event("nothing", 1.0)
    UNTRACED.end(2.0)


def test_times_are_those_of_the_clock_that_was_used() -> None:
    with client_span() as traced:
        begun = Trace.begin("Generate", 10.0, 12.5)
        begun.span("part", 11.0, 11.5, radixfleet__reason="prefix")
        begun.end(13.0, "broken")
    (whole, part) = traced.spans
    assert whole.end_time - whole.start_time == 3_000_000_000
    assert part.start_time - whole.start_time == 1_000_000_000
    assert part.end_time - part.start_time == 500_000_000
    assert dict(part.attributes) == {"radixfleet.reason": "prefix"}
    assert whole.status.status_code is trace.StatusCode.ERROR


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "otlp, console, none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "must be grpc"),
    ],
)
def test_what_cannot_be_sent_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TracesUnavailable, match=words):
        setup_tracing("radixfleet-router")


def test_without_the_sdk_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(TracesUnavailable, match=r"pip install 'radixfleet\[traces\]'"):
        setup_tracing("radixfleet-router")


@pytest.mark.parametrize("environment", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
def test_nothing_is_switched_on_unless_asked_for(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    setup_tracing("radixfleet-router")


def test_the_environment_switches_it_on() -> None:
    """In a process of its own, for the provider cannot be taken back."""
    program = (
        "from radixfleet.tracing import Trace, setup_tracing\n"
        "setup_tracing('radixfleet-router')\n"
        "Trace.begin('Generate', 0.0, 1.0).end(2.0)\n"
    )
    environment = {"OTEL_TRACES_EXPORTER": "console", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert '"name": "Generate"' in done.stderr
    assert '"service.name": "radixfleet-router"' in done.stderr
