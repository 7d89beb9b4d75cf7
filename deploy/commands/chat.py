"""`radixfleet chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import readline  # noqa: F401 - imported for its effect: line editing and history at the prompt
import sys
from typing import Any

import click
from rich.console import Console

from deploy.consoles import new_console
from deploy.endpoints import endpoint_option
from deploy.prompts import given, sampling_options, write_text
from deploy.tables import tokens_per_second
from radixfleet.answers import Completion
from radixfleet.client import Client
from radixfleet.compose import RequestOptions
from radixfleet.endpoint import Endpoint
from radixfleet.errors import InvalidRequest, RadixfleetError
from radixfleet.types import ChatMessage

_HELP = "/reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@click.command()
@click.option("--system", help="System prompt.")
@sampling_options
@endpoint_option
def chat(endpoint: Endpoint, system: str | None, **options: Any) -> None:
    """Talk to a model. The answer streams; below it stands where it was made and what came from the cache.

    Each turn sends the whole conversation, and the worker that holds it in its cache computes only what is new. At the
    prompt: /reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer.

    \b
    radixfleet chat
    radixfleet chat --system "You are a pirate." --temperature 0.7
    """
    console = new_console(stderr=True)
    with asyncio.Runner() as runner:
        client = runner.run(_open(endpoint))
        try:
            model = runner.run(client.model_info(options["model"] or ""))
            console.print(f"{model.model}: {_HELP}", style="dim")
            _Conversation(runner, client, console, system, given(options)).run()
        finally:
            runner.run(client.close())


async def _open(endpoint: Endpoint) -> Client:
    return Client(endpoint)


class _Conversation:
    """Turns until the user leaves. A turn that fails, or is stopped before its first word, is taken back."""

    def __init__(
        self, runner: asyncio.Runner, client: Client, console: Console, system: str | None, options: RequestOptions
    ) -> None:
        self._runner = runner
        self._client = client
        self._console = console
        self._options = options
        self._beginning = [ChatMessage("system", system)] if system is not None else []
        self._messages = list(self._beginning)

    def run(self) -> None:
        while (text := _read_line()) is not None:
            if text in ("/exit", "/quit"):
                return
            if text == "/reset":
                self._messages = list(self._beginning)
            elif text.startswith("/"):
                self._console.print(_HELP, style="dim")
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        question = ChatMessage("user", text)
        pieces: list[str] = []

        def take(piece: str) -> None:
            pieces.append(piece)
            write_text(piece)

        try:
            completion = self._runner.run(
                self._client.complete([*self._messages, question], on_text=take, **self._options)
            )
        except KeyboardInterrupt:
            click.echo()
            self._console.print("(stopped)", style="dim")
        except InvalidRequest as error:
            self._console.print(f"{error} (/reset starts anew)", style="red")
            return
        except RadixfleetError as error:
            if pieces:
                click.echo()
            self._console.print(str(error), style="red")
            return
        else:
            click.echo()
            self._console.print(_remark(completion), style="dim", soft_wrap=True)
        answer = "".join(pieces)
        if answer:
            self._messages += [question, ChatMessage("assistant", answer)]


def _read_line() -> str | None:
    """One line from the user; None at the end of input. Ctrl-C at the prompt clears the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            click.echo()


def _remark(completion: Completion) -> str:
    started, usage = completion.started, completion.usage
    why = f" ({started.route.reason})" if started.route else ""
    cached = "an unknown part" if usage.cached_tokens_unknown else usage.cached_tokens
    return (
        f"{started.worker_id}{why}: {cached} of {usage.prompt_tokens} prompt tokens cached, "
        f"first token after {1000 * completion.ttft_s:.0f} ms, {tokens_per_second(completion):.0f} tokens/s"
    )
