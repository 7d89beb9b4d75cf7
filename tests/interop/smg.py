"""Our workers behind another gateway, the wheel `smg` from PyPI: `python -m tests.interop.smg`.

Two workers with simulated GPUs, found by the gateway by SGLang's gRPC dialect. Chats, streams, clients that leave, and
requests that follow a prefix because the gateway follows our KV events. Installs smg (about 100 MB) under
--environments once. Prints what it saw.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deploy.bench.peers.servers import free_port
from tests.interop.engines import (
    ENVIRONMENTS,
    WHEELS,
    environment,
    gateway_command,
    process,
    say,
    until,
    worker_command,
)
from tests.support.tiny_model import tiny_model

_LONG = "You answer in one sentence, and you say so when you do not know something. " * 40


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help=f"[{ENVIRONMENTS}]")
    parser.add_argument("--python", type=Path, help="an interpreter that has smg, instead of installing it")
    arguments = parser.parse_args()
    python = arguments.python or environment(arguments.environments / "smg", (WHEELS["smg"],))
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-smg-"))
    say(f"logs: {folder}")
    with ExitStack() as stack:
        workers = [free_port(), free_port()]
        for number, port in enumerate(workers):
            command = worker_command(str(tiny_model()), port, f"w{number}", "--runner", "sim", "--log-level", "debug")
            stack.enter_context(process(command, folder / f"w{number}.log"))
        port, urls = free_port(), [f"grpc://127.0.0.1:{worker}" for worker in workers]
        gateway = gateway_command("smg", python, port, urls, log_level="debug")
        stack.enter_context(process(gateway, folder / "smg.log"))
        _check(f"http://127.0.0.1:{port}", folder)
    return 0


def _check(url: str, folder: Path) -> None:
    until(lambda: _can_chat(url), "the gateway has found a worker")
    logs = [folder / f"w{number}.log" for number in range(2)]
    until(lambda: "KV event stream connected" in (folder / "smg.log").read_text(), "the gateway follows KV events")

    whole = _post(url, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0})
    pieces = list(_stream(url, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}))
    streamed = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
    assert streamed == whole["choices"][0]["message"]["content"]
    say("chat, whole and streamed: the same text")

    system = {"role": "system", "content": _LONG}
    cached = []
    for number, question in enumerate(("one", "two", "three", "four")):
        body = {"messages": [system, {"role": "user", "content": question}], "max_tokens": 4}

        def chosen_by_events(body: dict[str, Any] = body, number: int = number) -> bool:
            """Asked until it is: the worker's events need a moment."""
            cached.append(_post(url, body)["usage"]["prompt_tokens_details"]["cached_tokens"])
            return _event_hits(folder) >= number

        until(chosen_by_events, "the gateway follows our KV events", 30)
    assert all(cached[1:]), cached
    hits = _event_hits(folder)
    say(f"chats with one system prompt: cached tokens {cached}; {hits} of the gateway's choices by our KV events")

    _leave(url, {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 3000, "ignore_eos": True})
    until(lambda: any("outcome=aborted" in log.read_text() for log in logs), "the worker has aborted the request")
    say("a client that left a stream: aborted at the worker by the gateway's Abort")

    status, message = _refused(url, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99_999_999})
    assert status == 400, status
    say(f"a request that cannot fit: 400, {message[:60]}...")


def _event_hits(folder: Path) -> int:
    """Choices that the gateway made because of KV events."""
    return (folder / "smg.log").read_text().count("event_hit")


def _request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    data = json.dumps({"model": "tiny", **body}).encode()
    return urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(_request(url, body), timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def _stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with urllib.request.urlopen(_request(url, {**body, "stream": True}), timeout=60) as response:
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])


def _leave(url: str, body: dict[str, Any]) -> None:
    """Read the beginning of a stream, and hang up."""
    for number, _ in enumerate(_stream(url, body)):
        if number == 3:
            return


def _refused(url: str, body: dict[str, Any]) -> tuple[int, str]:
    try:
        _post(url, body)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]
    raise AssertionError("it was taken")


def _can_chat(url: str) -> bool:
    try:
        _post(url, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    except OSError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
