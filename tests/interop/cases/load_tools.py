"""Load tools for OpenAI-compatible servers. What they measure of simulated workers says nothing."""

from __future__ import annotations

import json
from typing import Any

from tests.interop.case import Case, Context, Failed, run

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_REQUESTS = 48


def _aiperf(context: Context) -> str:
    python = context.python("aiperf", ["aiperf==0.13.0"])
    command = [str(python.parent / "aiperf"), "profile", "--model", "tiny", "--url", f"http://{context.fleet.http}"]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(context.fleet.model_dir)]
    command += ["--concurrency", "8", "--request-count", str(_REQUESTS), "--synthetic-input-tokens-mean", "200"]
    command += ["--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true", "--ui-type", "none"]
    command += ["--artifact-dir", str(context.output)]
    run(command, environment=_OFFLINE, timeout_s=400)
    results = json.loads(next(context.output.rglob("profile_export_aiperf.json")).read_text())
    _all_counted(results["request_count"]["avg"], results)
    return f"{_REQUESTS} requests"


def _guidellm(context: Context) -> str:
    python = context.python("guidellm", ["guidellm==0.8.1"])
    command = [str(python.parent / "guidellm"), "benchmark", "--target", f"http://{context.fleet.http}"]
    command += ["--model", "tiny", "--processor", str(context.fleet.model_dir), "--rate-type", "concurrent"]
    command += ["--rate", "8", "--max-requests", str(_REQUESTS), "--data", "prompt_tokens=200,output_tokens=16"]
    file = context.output / "results.json"
    command += ["--output-path", str(file), "--disable-console-interactive"]
    run(command, environment=_OFFLINE, timeout_s=400)
    totals = json.loads(file.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    _all_counted(totals["successful"], totals)
    return f"{_REQUESTS} requests"


def _sglang(context: Context) -> str:
    packages = ["sglang==0.5.23", "aiohttp", "numpy", "requests", "tqdm", "transformers", "pybase64", "pillow"]
    python = context.python("sglang", packages, dependencies=False)
    file = context.output / "results.jsonl"
    command = [str(python), "-m", "sglang.bench_serving", "--backend", "vllm", "--base-url"]
    command += [f"http://{context.fleet.http}", "--model", "tiny", "--tokenizer", str(context.fleet.model_dir)]
    command += ["--dataset-name", "random-ids", "--num-prompts", str(_REQUESTS), "--random-input-len", "200"]
    command += ["--random-output-len", "16", "--max-concurrency", "8", "--output-file", str(file)]
    run(command, environment=_OFFLINE, timeout_s=400)
    results = json.loads(file.read_text().splitlines()[-1])
    _all_counted(results["completed"], results)
    return f"{_REQUESTS} requests"


def _all_counted(count: float, results: Any) -> None:
    if count != _REQUESTS:
        raise Failed(f"{count:.0f} of {_REQUESTS} requests succeeded\n{json.dumps(results)[:2000]}")


CASES = (
    Case("aiperf", "aiperf 0.13.0", "profile --endpoint-type chat --streaming, 8 at a time", _aiperf),
    Case("guidellm", "guidellm 0.8.1", "benchmark --rate-type concurrent, 8 at a time", _guidellm),
    Case("sglang", "sglang.bench_serving 0.5.23", "--backend vllm, streamed, 8 at a time", _sglang),
)
