"""The same load through the gateway `smg` (cache_aware, by our KV events) and through our router, on the same workers.

    python tests/bench/bench_against_smg.py --smg ENVIRONMENT/bin/smg

Workers with simulated GPUs; both gateways are asked over OpenAI's HTTP API with streaming, in turns, and the caches are
emptied before each turn. Groups of prompts share long prefixes; arrivals are random, at a fixed rate. What counts are
the ratios: gateways, workers and clients share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from deploy.bench.peers.servers import free_port
from radixfleet.client import Client
from tests.interop.engines import process, router_command, say, worker_command
from tests.support.tiny_model import tiny_model

_WORDS = ("worker", "prefix", "router", "cache", "token", "page", "step", "plan", "lease", "block", "match", "load")


@dataclass
class Turn:
    """What one turn gave."""

    ttfts_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failures: int = 0
    seconds: float = 0.0

    @property
    def row(self) -> dict[str, float]:
        """The figures that are compared."""
        ordered = sorted(self.ttfts_s)
        return {
            "hit rate": self.cached_tokens / max(1, self.prompt_tokens),
            "TTFT p50 (s)": statistics.median(ordered),
            "TTFT p90 (s)": ordered[int(len(ordered) * 0.9)],
            "tokens/s": (self.prompt_tokens + self.completion_tokens) / self.seconds,
            "failures": self.failures,
        }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smg", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second")
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--prefix-words", type=int, default=500)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-against-smg-"))
    say(f"logs: {folder}")
    with ExitStack() as stack:
        addresses = []
        for number in range(arguments.workers):
            port = free_port()
            addresses.append(f"127.0.0.1:{port}")
            options = ["--runner", "sim", "--max-total-tokens", "16384", "--log-level", "warning"]
            command = worker_command(str(tiny_model()), port, f"w{number}", *options)
            stack.enter_context(process(command, folder / f"w{number}.log"))
        http, smg = free_port(), free_port()
        router = router_command(free_port(), addresses, "--log-level", "warning")
        router[router.index("--http-port") + 1] = str(http)
        stack.enter_context(process(router, folder / "router.log"))
        gateway = [str(arguments.smg), "launch", "--host", "127.0.0.1", "--port", str(smg), "--log-level", "warn"]
        gateway += ["--prometheus-port", str(free_port()), "--policy", "cache_aware"]
        gateway += ["--worker-urls", *(f"grpc://{address}" for address in addresses)]
        stack.enter_context(process(gateway, folder / "smg.log"))
        ports = {"smg": smg, "radixfleet": http}
        asyncio.run(_compare(ports, addresses, arguments))


async def _compare(ports: dict[str, int], addresses: list[str], arguments: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        for port in ports.values():
            await _ready(session, port)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
        for turn in range(arguments.turns):
            for name, port in ports.items():
                for address in addresses:
                    async with Client(address) as worker:
                        await worker.flush_cache()
                await asyncio.sleep(2.0)  # both follow the caches
                result = await _turn(session, port, arguments, seed=turn)
                rows[name].append(result.row)
                say(f"turn {turn}, {name}: {json.dumps({key: round(value, 3) for key, value in result.row.items()})}")
    say("| | smg | radixfleet | ratio |\n|---|---|---|---|")
    for key in rows["smg"][0]:
        theirs, ours = (statistics.fmean(row[key] for row in rows[name]) for name in ("smg", "radixfleet"))
        say(f"| {key} | {theirs:.3f} | {ours:.3f} | {ours / theirs if theirs else float('nan'):.2f} |")


async def _turn(session: aiohttp.ClientSession, port: int, arguments: argparse.Namespace, seed: int) -> Turn:
    draw = random.Random(seed)
    prefixes = [" ".join(draw.choices(_WORDS, k=arguments.prefix_words)) for _ in range(arguments.groups)]
    turn, began_s, due_s, tasks = Turn(), time.monotonic(), time.monotonic(), []
    for number in range(arguments.requests):
        due_s += draw.expovariate(arguments.rate)
        prompt = f"{draw.choice(prefixes)} {number} {' '.join(draw.choices(_WORDS, k=20))}"
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(_request(session, port, prompt, turn)))
    await asyncio.gather(*tasks)
    turn.seconds = time.monotonic() - began_s
    return turn


async def _request(session: aiohttp.ClientSession, port: int, prompt: str, turn: Turn) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    began_s, is_first = time.monotonic(), True
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
        if response.status != 200:
            turn.failures += 1
            return
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if is_first and any(choice.get("text") for choice in event.get("choices", ())):
                is_first = False
                turn.ttfts_s.append(time.monotonic() - began_s)
            usage = event.get("usage")
            if usage:
                turn.prompt_tokens += usage["prompt_tokens"]
                turn.completion_tokens += usage["completion_tokens"]
                turn.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def _ready(session: aiohttp.ClientSession, port: int) -> None:
    while True:
        turn = Turn()
        try:
            await _request(session, port, "are you there", turn)
        except aiohttp.ClientError:
            turn.failures += 1
        if not turn.failures:
            return
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    main()
