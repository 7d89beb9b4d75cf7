"""A real vLLM behind its own OpenAI server, a worker of ours by nothing but HTTP: `python -m tests.interop.vllm_http`.

First beside our own worker in one fleet: both serve the same two-layer Llama, made in code, in float32, so that greedy
answers must be equal token by token. Then alone behind a router that knows no tokenizer, where prompts go as text. Uses
the environment of `tests.interop.vllm`. Prints what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.peers.servers import free_port
from radixfleet.answers import Delta
from radixfleet.client import Client
from radixfleet.errors import InvalidRequest
from tests.interop.beside import (
    MESSAGES,
    follows_a_prefix,
    greedy_answers,
    killed,
    our_worker,
    prompt_of_words,
    serves_without_a_tokenizer,
    serving,
)
from tests.interop.engines import ENVIRONMENTS, process, router_command, say, until
from tests.interop.vllm import ENGINE_VARIABLES, vllm_environment
from tests.support.tiny_model import tiny_model


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help=f"[{ENVIRONMENTS}]")
    parser.add_argument("--python", type=Path, help="an interpreter that has vLLM, instead of installing it")
    arguments = parser.parse_args()
    python = arguments.python or vllm_environment(arguments.environments / "vllm")
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-vllm-http-"))
    say(f"logs: {folder}")
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny"
        shutil.copytree(tiny_model(hidden_size=128, num_heads=2, num_kv_heads=1), model)
        ports = {name: free_port() for name in ("vllm", "worker", "mixed", "alone", "http")}
        command = _vllm_command(python, model, ports["vllm"])
        engine = stack.enter_context(process(command, folder / "vllm.log", ENGINE_VARIABLES))
        stack.enter_context(process(our_worker(model, ports["worker"]), folder / "worker.log"))
        url, worker = f"http://127.0.0.1:{ports['vllm']}", f"127.0.0.1:{ports['worker']}"
        stack.enter_context(process(router_command(ports["mixed"], [url, worker]), folder / "mixed.log"))
        alone = router_command(ports["alone"], [url], "--http-port", str(ports["http"]))
        stack.enter_context(process(alone, folder / "alone.log"))
        asyncio.run(_check(ports, url, worker, engine))
    return 0


def _vllm_command(python: Path, model: Path, port: int) -> list[str]:
    options = ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--max-model-len", "2048", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", *options, "--enable-prompt-tokens-details"]


async def _check(ports: dict[str, int], url: str, worker: str, engine: subprocess.Popen[bytes]) -> None:
    async with (
        Client(f"127.0.0.1:{ports['mixed']}", timeout_s=120) as mixed,
        Client(f"127.0.0.1:{ports['alone']}", timeout_s=120) as alone,
        Client(worker, timeout_s=120) as direct,
    ):
        entries = await serving(mixed, engine, workers=2)
        vllm = next(entry.worker_id for entry in entries if entry.worker_id.startswith("openai@"))
        await _beside_our_worker(mixed, direct, vllm, url)
        await serving(alone, engine, workers=1)
        await serves_without_a_tokenizer(alone, vllm)
        with pytest.raises(InvalidRequest, match="--tokenizers"):
            await alone.tokenize("the router")
        _over_http(f"http://127.0.0.1:{ports['http']}")
        await killed(engine, mixed)


async def _beside_our_worker(client: Client, direct: Client, vllm: str, url: str) -> None:
    served, same_texts = {vllm: 0, "ours": 0}, 0
    for prompt, answer in await greedy_answers(client):
        reference = await direct.complete(prompt, temperature=0, max_new_tokens=24)
        told = f"{answer.token_ids} of {answer.started.worker_id}, not {reference.token_ids}"
        assert answer.token_ids == reference.token_ids, told
        if "\ufffd" not in answer.text + reference.text:  # what stands for half a character differs between the two
            assert answer.text == reference.text, (answer.text, reference.text)
            same_texts += 1
        served[str(answer.started.worker_id)] += 1
    assert all(served.values()), served
    say(
        f"24 greedy answers of 24 tokens: {served[vllm]} by vLLM, {served['ours']} by ours, all equal token by token, "
        f"{same_texts} whole texts equal too"
    )

    prompt = await follows_a_prefix(client, vllm)
    prompt += " " + prompt_of_words(950, 30)  # goes where its beginning is cached
    whole = await client.complete(prompt, temperature=0, max_new_tokens=16, logprobs=3)
    assert whole.started.worker_id == vllm
    assert [len(told.top) for told in whole.choices[0].logprobs] == [3] * 16
    found = re.search("(?<=...)[a-z]{2}", whole.text, re.DOTALL)
    assert found is not None, whole.text
    stop = found[0]
    stopped = await client.complete(prompt, temperature=0, max_new_tokens=16, stop=[stop])
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finished.matched_stop == stop
    many = await client.complete(prompt, n=3, temperature=1.0, max_new_tokens=8, ignore_eos=True)
    assert [len(choice.token_ids) for choice in many.choices] == [8, 8, 8]
    say("log probabilities, stop strings, n = 3: as asked")

    stream = client.generate(prompt, max_new_tokens=1500, ignore_eos=True)
    async for event in stream:
        if isinstance(event, Delta):
            break
    await stream.aclose()
    await asyncio.to_thread(until, lambda: not _running(url), "the engine is idle again", 30)
    say("a client that left a stream of 1,500 tokens: the engine was idle again")


def _over_http(url: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line for line in response.read().decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    events: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    say(f"a chat over OpenAI's HTTP through the router: {len(events)} events")


def _running(url: str) -> int:
    """Requests in the engine, by its own metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        told = re.findall(
            r"^vllm:num_requests_(?:running|waiting){[^}]*} ([0-9.]+)", page.read().decode(), re.MULTILINE
        )
    assert told, "the engine tells how many requests it has"
    return round(sum(map(float, told)))


if __name__ == "__main__":
    raise SystemExit(main())
