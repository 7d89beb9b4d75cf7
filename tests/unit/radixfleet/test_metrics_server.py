"""The metrics port: TLS, keys, and clients that are slow. That it serves metrics is in test_telemetry."""

from __future__ import annotations

import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

import prometheus_client
import pytest

from radixfleet import metrics_server
from radixfleet.access import Access
from radixfleet.guard import Guard
from radixfleet.keys import key_hash
from radixfleet.metrics_server import MetricsServer
from radixfleet.tls import ServerTls
from tests.support.certificates import Authority

KEYS = Guard(lambda: {key_hash("rfk_1"): "prometheus"}, lambda: ["token-0123456789"])


def registry() -> prometheus_client.CollectorRegistry:
    made = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("answer", "Of everything.", registry=made).set(42)
    return made


def scrape(url: str, *, key: str | None = None, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=20, context=tls) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_behind_its_block_nobody_listens() -> None:
    with MetricsServer(registry(), "127.0.0.1", 0) as server:
        port = server.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_where_there_are_keys_a_scrape_needs_one() -> None:
    with MetricsServer(registry(), "127.0.0.1", 0, {"/sd": lambda _: b"[]"}, Access(KEYS)) as server:
        for path in ("/metrics", "/sd", "/"):
            url = f"http://127.0.0.1:{server.port}{path}"
            for key in (None, "rfk_2"):
                status, body = scrape(url, key=key)
                assert (status, "42" in body) == (401, False)
                assert "rfk_2" not in body
        assert scrape(f"http://127.0.0.1:{server.port}/sd", key="rfk_1") == (200, "[]")
        assert "answer 42.0" in scrape(f"http://127.0.0.1:{server.port}/metrics", key="token-0123456789")[1]


def test_with_a_certificate_it_speaks_tls_alone_and_asks_for_theirs_where_a_ca_is_given(tmp_path: Path) -> None:
    authority = Authority()
    ca, server_pair = authority.write(tmp_path), authority.issue("server", tmp_path)
    client = authority.issue("client", tmp_path)
    trusting = ssl.create_default_context(cafile=ca)
    with MetricsServer(
        registry(), "127.0.0.1", 0, access=Access(tls=ServerTls(server_pair.cert, server_pair.key))
    ) as it:
        assert "answer 42.0" in scrape(f"https://127.0.0.1:{it.port}/metrics", tls=trusting)[1]
        with pytest.raises(OSError, match=r"."):
            scrape(f"http://127.0.0.1:{it.port}/metrics")
    mutual = Access(tls=ServerTls(server_pair.cert, server_pair.key, ca))
    with MetricsServer(registry(), "127.0.0.1", 0, access=mutual) as it:
        with pytest.raises(OSError, match=r"."):
            scrape(f"https://127.0.0.1:{it.port}/metrics", tls=trusting)
        trusting.load_cert_chain(client.cert, client.key)
        assert "answer 42.0" in scrape(f"https://127.0.0.1:{it.port}/metrics", tls=trusting)[1]


def test_a_client_that_says_nothing_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_server._SilentHandler, "timeout", 0.1)
    with (
        MetricsServer(registry(), "127.0.0.1", 0) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as silent,
    ):
        silent.sendall(b"GET /metr")
        assert silent.recv(1) == b""
    assert capsys.readouterr().err == ""


def test_a_client_that_says_a_little_now_and_then_is_hung_up_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_LONGEST_S", 0.2)
    with (
        MetricsServer(registry(), "127.0.0.1", 0) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow,
    ):
        slow.sendall(b"GET /metrics HTTP/1.0\r\nX-Long: ")
        slow.settimeout(0.02)
        for _ in range(1000):
            try:
                slow.sendall(b"x")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it still holds its thread")


def test_who_is_hung_up_on_hears_nothing_unencrypted(tmp_path: Path) -> None:
    pair = Authority().issue("server", tmp_path)
    context = ServerTls(pair.cert, pair.key).ssl_context()
    ours, theirs = socket.socketpair()
    with theirs, context.wrap_socket(ours, server_side=True, do_handshake_on_connect=False) as request:
        metrics_server._hang_up(request)
        with pytest.raises(OSError, match=r"."):
            request.write(b"a secret")  # ValueError where TLS is off
        assert theirs.recv(1) == b""


@pytest.mark.parametrize("left", [0, 1], ids=["for the scrape", "for its end"])
def test_scrapes_that_no_thread_was_left_for_take_no_place(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    monkeypatch.setattr(metrics_server, "_MAX_SCRAPES", 1)
    with MetricsServer(registry(), "127.0.0.1", 0) as server:
        places = server._server._places
        starts: list[threading.Thread] = []

        def start(thread: threading.Thread) -> None:
            starts.append(thread)
            if len(starts) > left:
                raise RuntimeError("can't start new thread")
            begin(thread)

        begin = threading.Thread.start
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as turned_away:
                assert turned_away.recv(1) == b""
        assert places.acquire(timeout=20)
        places.release()
        assert "answer 42.0" in scrape(f"http://127.0.0.1:{server.port}/metrics")[1]


def test_silent_clients_take_no_more_than_their_share_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_MAX_SCRAPES", 2)
    with MetricsServer(registry(), "127.0.0.1", 0) as server:
        address = ("127.0.0.1", server.port)
        silent = [socket.create_connection(address, timeout=20) for _ in range(2)]
        with socket.create_connection(address, timeout=20) as third:
            assert third.recv(1) == b""  # turned away at once
        for one in silent:
            one.close()
