"""`radixfleet generate`: completions of one prompt, for people or for scripts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from deploy.endpoints import endpoint_option
from deploy.numbers import Number
from deploy.options import json_option
from deploy.prompts import given, prompt_options, read_prompt, sampling_options, write_text
from radixfleet.answers import Choice, Completion
from radixfleet.client import Client
from radixfleet.compose import PromptInput, RequestOptions
from radixfleet.endpoint import Endpoint
from radixfleet.errors import RadixfleetError


@click.command()
@prompt_options
@sampling_options
@click.option("--n", type=int, help="So many completions of the prompt, which is computed once.")
@click.option("--logprobs", type=int, help="Show each token's log probability, and so many of the likeliest.")
@click.option("--request-id", help="Your name for the request, for logs.")
@click.option("--timeout", "timeout_s", type=Number(0, min_open=True), help="Seconds for the whole request.")
@json_option
@endpoint_option
def generate(
    endpoint: Endpoint,
    prompt: str | None,
    prompt_file: Path | None,
    system: str | None,
    timeout_s: float | None,
    *,
    raw: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate a completion and print it as it comes; with --n, several, printed at the end.

    \b
    radixfleet generate "Why is the sky blue?" --max-new-tokens 64
    radixfleet generate --raw --prompt "Once upon a time" --temperature 0 --json | jq .cached_tokens
    git diff | radixfleet generate --prompt-file - --system "Summarise the change."
    radixfleet generate --prompt "Invent a person." --json-schema person.json --n 3

    With --json, one object: text, token_ids, request_id, worker, reason, prompt_tokens, cached_tokens,
    completion_tokens, ttft_s, total_s, finish_reason; with --logprobs, logprobs; with --n, choices: a list of objects
    with index, text, token_ids, finish_reason and logprobs.
    """
    form = read_prompt(prompt, prompt_file, system, raw=raw)
    several = (options["n"] or 1) > 1
    completion = asyncio.run(_generate(endpoint, form, given(options), timeout_s, quiet=as_json or several))
    if as_json:
        click.echo(json.dumps(as_object(completion), ensure_ascii=False))
        return
    for choice in completion.choices:
        click.echo(f"--- {choice.index} ({choice.finished.reason})\n{choice.text}" if several else "")
        for token_id, told in zip(choice.token_ids, choice.logprobs, strict=False):
            others = "  ".join(f"{other}:{logprob:.3f}" for other, logprob in told.top)
            click.echo(f"{token_id:8}{told.logprob:9.3f}   {others}".rstrip())


def as_object(completion: Completion) -> dict[str, Any]:
    """A completion as scripts read it."""
    started, usage = completion.started, completion.usage
    more: dict[str, Any] = {}
    if len(completion.choices) > 1:
        more["choices"] = [_choice_object(choice) for choice in completion.choices]
    if completion.choices[0].logprobs:
        more["logprobs"] = _choice_object(completion.choices[0])["logprobs"]
    return more | {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "request_id": started.request_id,
        "worker": started.worker_id,
        "reason": started.route.reason if started.route else "direct",
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "ttft_s": round(completion.ttft_s, 6),
        "total_s": round(completion.total_s, 6),
        "finish_reason": str(completion.finished.reason),
    }


def _choice_object(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": str(choice.finished.reason),
        "logprobs": [{"logprob": told.logprob, "top": [list(pair) for pair in told.top]} for told in choice.logprobs],
    }


async def _generate(
    endpoint: Endpoint, prompt: PromptInput, options: RequestOptions, timeout_s: float | None, *, quiet: bool
) -> Completion:
    written = False

    def write(text: str) -> None:
        nonlocal written
        written = True
        write_text(text)

    async with Client(endpoint, timeout_s=timeout_s) as client:
        try:
            return await client.complete(prompt, on_text=None if quiet else write, **options)
        except (RadixfleetError, asyncio.CancelledError):
            if written:  # what is said next begins on a line of its own
                write_text("\n")
            raise
