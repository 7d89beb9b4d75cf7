"""What is asked of an engine over HTTP, without an engine."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from radixfleet.clock import ManualClock
from radixfleet.errors import DeadlineExceeded
from radixfleet.tls import ClientTls, ServerTls
from router.dialects.http_connection import HttpConnection
from router.dialects.speaker import Unreachable
from router.http.server import HttpServer
from router.worker_address import engine_address
from tests.support.certificates import Authority


async def test_a_deadline_that_has_passed_asks_nothing_and_leaves_nothing_behind() -> None:
    """What was begun and never sent warned in the log of a coroutine that nobody awaits."""
    http = HttpConnection(
        engine_address("http://127.0.0.1:9"), ManualClock(), connect_timeout_s=1.0, api_key=lambda: None
    )
    with pytest.raises(DeadlineExceeded):
        await http.post("/completions", {}, {}, asyncio.get_running_loop().time() - 1.0)
    await http.close()
    gc.collect()


async def test_engines_over_https_are_known_by_our_ca_and_by_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the machine alone were taken: engines with certificates of one's own CA could not be named."""
    ours, machines, strangers = Authority("ours"), Authority("machines"), Authority("strangers")
    monkeypatch.setenv("SSL_CERT_FILE", str(machines.write(tmp_path, "machines-ca")))
    tls = ClientTls(ours.write(tmp_path, "ours-ca"))
    for authority, answer in ((ours, "hello"), (machines, "hello"), (strangers, "refused")):
        pair = authority.issue("engine", tmp_path)
        server = HttpServer(
            PlainTextResponse("hello"), "127.0.0.1", 0, tls=ServerTls(pair.cert, pair.key).ssl_context()
        )
        server.start()
        try:
            assert await _asked(server.port, tls) == answer
        finally:
            await server.close()


async def _asked(port: int, tls: ClientTls) -> str:
    address = engine_address(f"https://127.0.0.1:{port}")
    http = HttpConnection(address, ManualClock(), connect_timeout_s=20.0, api_key=lambda: None, tls=tls)
    try:
        return (await http.get(f"{address.base}/models", 20.0))[1].decode()
    except Unreachable as error:
        return "refused" if "certificate" in str(error).lower() else str(error)
    finally:
        await http.close()
