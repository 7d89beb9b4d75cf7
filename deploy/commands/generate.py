"""`radixfleet generate`: one completion, for people or for scripts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from deploy.options import endpoint_option, json_option
from deploy.prompts import given, prompt_options, read_prompt, sampling_options, write_text
from radixfleet.answers import Completion
from radixfleet.client import Client
from radixfleet.compose import PromptInput, RequestOptions


@click.command()
@prompt_options
@sampling_options
@click.option("--request-id", help="Your name for the request, for logs.")
@click.option("--timeout", "timeout_s", type=float, help="Seconds for the whole request.")
@json_option
@endpoint_option
def generate(
    endpoint: str,
    prompt: str | None,
    prompt_file: Path | None,
    system: str | None,
    timeout_s: float | None,
    *,
    raw: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate one completion and print it as it comes.

    \b
    radixfleet generate --prompt "Why is the sky blue?" --max-new-tokens 64
    radixfleet generate --raw --prompt "Once upon a time" --temperature 0 --json | jq .cached_tokens
    git diff | radixfleet generate --prompt-file - --system "Summarise the change."

    With --json, one object: text, token_ids, request_id, worker, reason, prompt_tokens, cached_tokens,
    completion_tokens, ttft_s, total_s, finish_reason.
    """
    form = read_prompt(prompt, prompt_file, system, raw=raw)
    completion = asyncio.run(_generate(endpoint, form, given(options), timeout_s, quiet=as_json))
    click.echo(json.dumps(as_object(completion), ensure_ascii=False) if as_json else "")


def as_object(completion: Completion) -> dict[str, Any]:
    """A completion as scripts read it."""
    started, finished = completion.started, completion.finished
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "request_id": started.request_id,
        "worker": started.worker_id,
        "reason": started.route.reason if started.route else "direct",
        "prompt_tokens": finished.usage.prompt_tokens,
        "cached_tokens": finished.usage.cached_tokens,
        "completion_tokens": finished.usage.completion_tokens,
        "ttft_s": round(completion.ttft_s, 6),
        "total_s": round(completion.total_s, 6),
        "finish_reason": str(finished.reason),
    }


async def _generate(
    endpoint: str, prompt: PromptInput, options: RequestOptions, timeout_s: float | None, *, quiet: bool
) -> Completion:
    async with Client(endpoint, timeout_s=timeout_s) as client:
        return await client.complete(prompt, on_text=None if quiet else write_text, **options)
