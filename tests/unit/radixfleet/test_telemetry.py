"""Logs for people and for programs, and the metrics endpoint."""

from __future__ import annotations

import json
import logging
import socket
import urllib.error
import urllib.request

import prometheus_client
import pytest
import structlog

from radixfleet import telemetry
from radixfleet.metrics_server import MetricsServer
from radixfleet.telemetry import setup_logging


@pytest.fixture(autouse=True)
def _logging_as_before():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def fail() -> None:
    secret_prompt = "what the user wrote"
    raise KeyError(len(secret_prompt))


def test_json_lines_from_every_logger(capsys):
    setup_logging("info", json=True)
    structlog.get_logger().info("request", worker="w0", tokens=3)
    logging.getLogger("grpc").warning("odd %s", "thing")
    try:
        fail()
    except KeyError:
        structlog.get_logger().exception("broken")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("request", "info"),
        ("odd thing", "warning"),
        ("broken", "error"),
    ]
    assert (lines[0]["worker"], lines[0]["tokens"]) == ("w0", 3)
    assert all(line["timestamp"].endswith("Z") for line in lines)
    assert "KeyError" in lines[2]["exception"]


def test_lines_for_people(capsys):
    setup_logging("info")
    structlog.get_logger().info("request", worker="w0")
    logging.getLogger("grpc").warning("odd %s", "thing")
    first, second = capsys.readouterr().err.splitlines()
    assert "request" in first
    assert "worker=w0" in first
    assert "odd thing" in second
    assert "\x1b" not in first


@pytest.mark.parametrize("as_json", [True, False])
def test_tracebacks_hold_no_values_of_variables(capsys, as_json):
    """What users wrote must not leak into logs by way of a traceback."""
    setup_logging(json=as_json)
    try:
        fail()
    except KeyError:
        structlog.get_logger().exception("broken")
    text = capsys.readouterr().err
    assert "test_telemetry.py" in text
    assert "what the user wrote" not in text


@pytest.mark.parametrize(("level", "expected"), [("debug", 4), ("info", 3), ("WARNING", 2), ("error", 1)])
def test_the_level_holds_for_every_logger(capsys, level, expected):
    setup_logging(level)
    for logger in (structlog.get_logger(), logging.getLogger("foreign")):
        logger.debug("a")
        logger.info("a")
        logger.warning("a")
        logger.error("a")
    assert len(capsys.readouterr().err.splitlines()) == 2 * expected


def test_bound_context_is_in_every_line(capsys):
    setup_logging(json=True)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger().info("inside")
    structlog.get_logger().info("outside")
    inside, outside = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert inside["request_id"] == "r1"
    assert "request_id" not in outside


def test_setting_up_again_does_not_double_lines(capsys):
    setup_logging()
    setup_logging()
    structlog.get_logger().info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_metrics_are_served_at_any_kind_of_address(host):
    if host == "::1" and not _has_ipv6_loopback():
        pytest.skip("this machine has no IPv6 loopback")
    with MetricsServer(prometheus_client.CollectorRegistry(), host, 0) as server:
        shown = f"[{host}]" if ":" in host else host
        with urllib.request.urlopen(f"http://{shown}:{server.port}/metrics", timeout=60) as response:
            assert response.status == 200


def _has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_metrics_are_served_until_closed(capsys):
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("radixfleet_requests", "Requests.", registry=registry).inc(3)
    with MetricsServer(registry, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            text = response.read().decode()
        assert "radixfleet_requests_total 3.0" in text
        assert "python_info" not in text
        with pytest.raises(OSError, match="in use"):
            MetricsServer(registry, "127.0.0.1", server.port)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=60)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", [name for name in dir(telemetry) if name.endswith("_BUCKETS_S")])
def test_buckets_are_what_a_histogram_takes(name):
    buckets = getattr(telemetry, name)
    registry = prometheus_client.CollectorRegistry()
    histogram = prometheus_client.Histogram("h", "h", buckets=buckets, registry=registry)
    histogram.observe(buckets[0])
    assert registry.get_sample_value("h_bucket", {"le": repr(float(buckets[0]))}) == 1
    assert list(buckets) == sorted(set(buckets))
