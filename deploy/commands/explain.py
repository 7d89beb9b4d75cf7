"""`radixfleet explain`: where a prompt would go."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import click

from deploy.consoles import new_console
from deploy.endpoints import endpoint_option
from deploy.options import json_option
from deploy.prompts import given, prompt_options, read_prompt
from deploy.tables import candidates_table, print_whole
from radixfleet.answers import Explanation
from radixfleet.client import Client
from radixfleet.compose import PromptInput, RequestOptions
from radixfleet.endpoint import Endpoint


@click.command()
@prompt_options
@click.option("--model", help="Which model; default: the only one served.")
@click.option("--cache-salt", help="Share cached prefixes only with requests of the same salt.")
@json_option
@endpoint_option
def explain(
    endpoint: Endpoint,
    prompt: str | None,
    prompt_file: Path | None,
    system: str | None,
    model: str | None,
    cache_salt: str | None,
    *,
    raw: bool,
    as_json: bool,
) -> None:
    """Show where the router would send a prompt now, and what each worker would cost. Sends nothing, books nothing.

    \b
    radixfleet explain "Why is the sky blue?"
    radixfleet explain --prompt-file chat.txt --json

    The reasons: only (no other worker could), prefix (nobody holds more of the prompt), spill (another holds more, but
    is busier), load (nobody holds any of it). Exit code 3 when no worker is eligible.
    """
    form = read_prompt(prompt, prompt_file, system, raw=raw)
    explanation = asyncio.run(_explain(endpoint, form, given({"model": model, "cache_salt": cache_salt})))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(explanation)))
    else:
        chosen = f"{explanation.worker_id} ({explanation.reason})" if explanation.worker_id else "nowhere"
        console = new_console()
        console.print(
            f"{explanation.prompt_tokens} tokens, {explanation.prompt_blocks} routing blocks, "
            f"policy {explanation.policy}: would go to {chosen}"
        )
        print_whole(console, candidates_table(explanation))
    if not explanation.worker_id:
        raise click.exceptions.Exit(3)


async def _explain(endpoint: Endpoint, prompt: PromptInput, options: RequestOptions) -> Explanation:
    async with Client(endpoint) as client:
        return await client.explain(prompt, **options)
