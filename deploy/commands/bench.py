"""`radixfleet bench`: measure on this machine what the README claims."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec

from deploy.bench.chunks import NothingBetween, sweep
from deploy.bench.overlap import compare
from deploy.bench.tables import chunks_table, comparison_table
from deploy.bench.workload import Workload
from deploy.commands.bench_fleet import fleet
from deploy.consoles import new_console
from deploy.interruptible import run_interruptible
from deploy.machine import num_cores
from deploy.options import Several, json_option
from deploy.tables import print_whole
from worker.engine.config import EngineConfig
from worker.engine.handle import EngineLoadError
from worker.model.sources import resolve_model
from worker.runner.sim import CostModel, SimRunnerConfig
from worker.runner.torch_config import TorchRunnerConfig

SIM_WORKLOAD = Workload(num_requests=456, num_prefixes=16, prefix_tokens=3968, unique_tokens=64, new_tokens=(96, 352))
"""256 requests run and 200 wait, with contexts of 4k tokens."""
SIM_RUNNER = SimRunnerConfig(
    kv_tokens=1_310_720,
    max_running_requests=256,
    max_context_tokens=8192,
    cost=CostModel(step_s=5e-3, prefill_token_s=1e-5, decode_token_s=1e-5, context_token_s=4e-9),
)
"""A decode step of a full batch takes about 12 ms: a GPU's, of a model with little KV a token."""
TORCH_WORKLOAD = Workload(num_requests=24, num_prefixes=4, prefix_tokens=128, unique_tokens=64, new_tokens=(16, 48))
_TORCH_MEMORY_BYTES = 2 << 30

Result = TypeVar("Result")


@click.group()
def bench() -> None:
    """Measure an engine, or a fleet under load."""


bench.add_command(fleet)


@bench.command()
@click.option("--runner", type=click.Choice(["both", "torch", "sim"]), default="both", show_default=True)
@click.option("--model", default="demo", show_default=True, help="For torch: demo, a directory or a .gguf file.")
@click.option("--device", default="auto", show_default=True, help="For torch: auto, cpu, cuda or cuda:N.")
@click.option("--threads", type=click.IntRange(1, 1024), help="For torch on a CPU; default: cores.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Pairs of rounds.")
@click.option(
    "--chunk-sizes",
    type=Several(click.IntRange(1)),
    metavar="N,N,...",
    help="Instead, measure what chunks of so many tokens cost a running answer and a long prompt.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="With --chunk-sizes: the long prompts' length.",
)
@click.option(
    "--peers",
    is_flag=False,
    flag_value="all",
    metavar="[NAME,...]",
    help="Instead, compare with other engines on the CPU: vllm, llama.cpp, llama.cpp-quantized, transformers.",
)
@click.option("--install", is_flag=True, help="With --peers: install those that are missing, in the cache folder.")
@json_option
def engine(  # noqa: PLR0913  an option each
    *,
    runner: Literal["both", "torch", "sim"],
    model: str,
    device: str,
    threads: int | None,
    rounds: int,
    chunk_sizes: tuple[int, ...] | None,
    prompt_tokens: int,
    peers: str | None,
    install: bool,
    as_json: bool,
) -> None:
    """Compare overlapped and serial scheduling: the device's idle time between steps, and throughput.

    On torch with a model, and on a simulated GPU with 256 running and 200 waiting requests of 4k tokens. Takes
    about two minutes; the machine should do nothing else.

    With --peers instead: the same prompts on the same weights in one run, in turns with other engines, through the
    server of each: first with a shared prefix, then without, then one request at a time. They are installed by
    --install, each in an environment of its own in the cache folder (gigabytes, and minutes to compile). About eight
    minutes.

    \b
    radixfleet bench engine
    radixfleet bench engine --runner sim --rounds 5 --json
    radixfleet bench engine --chunk-sizes 128,256,512,1024,2048
    radixfleet bench engine --peers --install
    radixfleet bench engine --peers vllm,llama.cpp --rounds 5 --json
    """
    if peers is not None:
        from deploy.commands import bench_peers  # imports torch

        bench_peers.run(peers, model, threads or num_cores(), rounds, install_missing=install, as_json=as_json)
        return
    if install:
        raise click.UsageError("--install installs the engines that --peers compares with: give that, too")
    torch_config = _torch_config(model, device, threads or num_cores()) if runner != "sim" or chunk_sizes else None
    if torch_config is not None and chunk_sizes:
        _chunks(torch_config, chunk_sizes, prompt_tokens, as_json=as_json)
        return
    comparisons = []
    if torch_config is not None:
        comparisons.append(_run(compare(f"torch, {model}", torch_config, TORCH_WORKLOAD, rounds, _tell)))
    if runner != "torch":
        sim_config = EngineConfig(runner=SIM_RUNNER, log_level="warning")
        comparisons.append(_run(compare("simulated GPU", sim_config, SIM_WORKLOAD, rounds, _tell)))
    if as_json:
        click.echo(json.dumps([each.as_object() for each in comparisons], indent=2))
        return
    console = new_console()
    for comparison in comparisons:
        print_whole(console, comparison_table(comparison))


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Raises ClickException where an engine cannot load, and where prompts are too short to tell anything."""
    try:
        return run_interruptible(work)
    except (EngineLoadError, NothingBetween) as error:
        raise click.ClickException(str(error)) from error


def _chunks(config: EngineConfig, sizes: Sequence[int], prompt_tokens: int, *, as_json: bool) -> None:
    configs = [(size, _with_chunks(config, size)) for size in sizes]
    figures = _run(sweep(configs, prompt_tokens, num_prompts=3, tell=_tell))
    if as_json:
        click.echo(json.dumps([each.as_object() for each in figures], indent=2))
    else:
        print_whole(new_console(), chunks_table(figures, prompt_tokens))


def _torch_config(model: str, device: str, threads: int) -> EngineConfig:
    path: Path = resolve_model(model, _tell)
    runner = TorchRunnerConfig(
        model_path=str(path),
        device=device,
        device_memory_bytes=_TORCH_MEMORY_BYTES,
        max_running_requests=8,
        num_threads=threads,
    )
    return EngineConfig(runner=runner, log_level="warning")


def _with_chunks(config: EngineConfig, size: int) -> EngineConfig:
    """The engine with chunks of `size`, for a running request and one long prompt at a time."""
    assert isinstance(config.runner, TorchRunnerConfig)
    runner = msgspec.structs.replace(config.runner, chunked_prefill_size=size, max_running_requests=2)
    return msgspec.structs.replace(config, runner=runner)


def _tell(text: str) -> None:
    click.echo(text, err=True)
