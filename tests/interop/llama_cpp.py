"""llama.cpp's own server behind our router, a worker of ours by nothing but HTTP: `python -m tests.interop.llama_cpp`.

First beside our own worker in one fleet: both serve the same two-layer Llama, made in code and written as one GGUF file
in float32, so that greedy answers must be equal. Then alone behind a router that knows no tokenizer, where prompts go
as text. Compiles the server where `radixfleet bench engine --peers llama.cpp --install` has not. Prints what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import urllib.request
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from deploy.bench.peers import llama_cpp
from deploy.bench.peers.environments import peers_directory
from deploy.bench.peers.servers import free_port
from radixfleet.answers import Delta
from radixfleet.client import Client
from radixfleet.errors import InvalidRequest
from tests.interop.beside import (
    follows_a_prefix,
    greedy_answers,
    killed,
    our_worker,
    prompt_at,
    serves_without_a_tokenizer,
    serving,
)
from tests.interop.engines import process, router_command, say, until
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import tiny_model

_SLOTS, _SLOT_TOKENS = 4, 2048
_LONG = 1900


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, help="a llama-server, instead of compiling one")
    arguments = parser.parse_args()
    server = arguments.server or _compiled(peers_directory() / "llama.cpp")
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-llama-cpp-"))
    say(f"logs: {folder}")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory = tiny_model(hidden_size=128, num_heads=2, num_kv_heads=1)
        model = write_gguf(directory, scratch / "tiny.gguf")
        ports = {name: free_port() for name in ("engine", "worker", "mixed", "alone")}
        engine = stack.enter_context(process(_command(server, model, ports["engine"]), folder / "llama.log"))
        stack.enter_context(process(our_worker(model, ports["worker"]), folder / "worker.log"))
        url, worker = f"http://127.0.0.1:{ports['engine']}", f"127.0.0.1:{ports['worker']}"
        stack.enter_context(process(router_command(ports["mixed"], [url, worker]), folder / "mixed.log"))
        stack.enter_context(process(router_command(ports["alone"], [url]), folder / "alone.log"))
        asyncio.run(_check(ports, worker, engine, _pieces_of_characters(directory)))
    return 0


def _compiled(folder: Path) -> Path:
    if not llama_cpp.is_installed(folder):
        folder.mkdir(parents=True, exist_ok=True)
        llama_cpp.install(folder, say)
    return llama_cpp.server_path(folder)


def _command(server: Path, model: Path, port: int) -> list[str]:
    options = ["--model", str(model), "--alias", "tiny", "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
    options += ["--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _SLOT_TOKENS)]
    # As exact as our worker: it keeps KV in half precision otherwise.
    return [str(server), *options, "--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]


async def _check(ports: dict[str, int], worker: str, engine: subprocess.Popen[bytes], banned: dict[int, float]) -> None:
    async with (
        Client(f"127.0.0.1:{ports['mixed']}", timeout_s=120) as mixed,
        Client(f"127.0.0.1:{ports['alone']}", timeout_s=120) as alone,
        Client(worker, timeout_s=120) as direct,
    ):
        entries = await serving(mixed, engine, workers=2)
        theirs = next(entry for entry in entries if entry.worker_id.startswith("openai@"))
        assert theirs.info.model.max_context_tokens == _SLOT_TOKENS
        name = str(theirs.worker_id)
        await _equal_answers(mixed, direct, name, banned)
        await follows_a_prefix(mixed, name)
        await _parameters(mixed, name, banned)
        await serving(alone, engine, workers=1)
        await serves_without_a_tokenizer(alone, name)
        await _refusals(alone)
        await _leaving(alone, f"http://127.0.0.1:{ports['engine']}")
        await killed(engine, mixed)


async def _equal_answers(client: Client, direct: Client, name: str, banned: dict[int, float]) -> None:
    """By their texts: it tells no token ids. Pieces of characters are banned, for who gives what of half a character,
    and when, differs between the two."""
    served = {name: 0, "ours": 0}
    for prompt, answer in await greedy_answers(client, logit_bias=banned):
        reference = await direct.complete(prompt, temperature=0, max_new_tokens=24, logit_bias=banned)
        served[str(answer.started.worker_id)] += 1
        assert answer.text == reference.text, f"{answer.text!r} of {answer.started.worker_id}, not {reference.text!r}"
        assert answer.usage.completion_tokens == reference.usage.completion_tokens
    assert all(served.values()), served
    say(f"24 greedy answers of 24 tokens: {served[name]} by llama.cpp, {served['ours']} by ours, all texts equal")


def _pieces_of_characters(directory: Path) -> dict[int, float]:
    """Tokens that are no text by themselves, each with a bias that keeps it out of an answer."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    return {token_id: -100.0 for token_id in range(size) if not tokenizer.decode([token_id]).isascii()}


async def _parameters(client: Client, name: str, banned: dict[int, float]) -> None:
    """What it knows goes to it as it goes to our worker; what it does not goes to ours."""
    prompt = await prompt_at(client, name, 200)
    whole = await client.complete(prompt, temperature=0, max_new_tokens=16, logit_bias=banned)
    assert whole.started.worker_id == name
    stop = whole.text[5:8]
    stopped = await client.complete(prompt, temperature=0, max_new_tokens=16, logit_bias=banned, stop=[stop])
    assert (stopped.started.worker_id, stopped.text) == (name, whole.text[: whole.text.index(stop)])
    seeded = [(await client.complete(prompt, seed=7, temperature=1.0, max_new_tokens=8)).text for _ in range(2)]
    assert seeded[0] == seeded[1]
    for options in ({"n": 2}, {"min_new_tokens": 2}, {"stop_token_ids": [3]}, {"regex": "[0-9]+"}, {"logprobs": 1}):
        done = await client.complete(prompt, max_new_tokens=4, **options)
        assert done.started.worker_id == "ours", options
    say("stop strings and seeds as asked; n, min_new_tokens, stop_token_ids, regex and logprobs went to our worker")


async def _refusals(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="several completions"):
        await client.complete("the router", n=2, max_new_tokens=2)
    with pytest.raises(InvalidRequest, match=r"2,?048"):
        await client.complete(list(range(5, 260)) * 10, max_new_tokens=2)


async def _leaving(client: Client, url: str) -> None:
    async with aclosing(client.generate("the router", max_new_tokens=_LONG, ignore_eos=True)) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    await asyncio.to_thread(until, lambda: not any(slot["is_processing"] for slot in _slots(url)), "idle again", 30)
    longest = max(slot.get("n_prompt_tokens", 0) for slot in _slots(url))  # with what was generated behind it
    assert longest < _LONG, "it went on without a reader"
    say(f"a client that left an answer of {_LONG:,} tokens: the server gave it up")


def _slots(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/slots", timeout=10) as page:
        told: list[dict[str, Any]] = json.load(page)
    return told


if __name__ == "__main__":
    raise SystemExit(main())
