"""What goes into a request and comes out: the prompt from an option, a file or standard input, sampling, the text."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from deploy.numbers import Number
from radixfleet.compose import RequestOptions

Command = TypeVar("Command", bound=Callable[..., Any])

_SAMPLING = (
    click.option("--max-new-tokens", type=int, help="At most this many tokens; default: the worker's."),
    click.option("--temperature", type=Number(), help="0 is greedy; default 1."),
    click.option("--top-p", type=Number(), help="Keep the smallest set of tokens with this much probability."),
    click.option("--top-k", type=int, help="Keep the k most likely tokens."),
    click.option("--min-p", type=Number(), help="Keep tokens at least this likely, relative to the likeliest."),
    click.option(
        "--seed",
        type=int,
        help="Makes the draws repeatable (to the last token with the worker's deterministic inference).",
    ),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end of the answer."),
    click.option("--frequency-penalty", type=Number(), help="Discourage tokens for each time they came; -2 to 2."),
    click.option("--presence-penalty", type=Number(), help="Discourage tokens that came already; -2 to 2."),
    click.option("--repetition-penalty", type=Number(), help="Above 1, discourage tokens of prompt and answer."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=lambda _context, _option, values: _read_bias(values),
        help="Add to the logit of a token, -100 to 100; may be given several times.",
    ),
    click.option(
        "--json-schema",
        metavar="FILE",
        callback=lambda _context, _option, path: _read_grammar(path),
        help="The answer must be JSON of this schema; - reads standard input.",
    ),
    click.option("--json-object", is_flag=True, default=None, help="The answer must be a JSON object."),
    click.option("--regex", help="The answer must match this regular expression as a whole."),
    click.option(
        "--lark",
        metavar="FILE",
        callback=lambda _context, _option, path: _read_grammar(path),
        help="The answer must keep to this Lark grammar; - reads standard input.",
    ),
    click.option("--model", help="Which model; default: the only one served."),
    click.option("--cache-salt", help="Share cached prefixes only with requests of the same salt."),
)


def prompt_options(command: Command) -> Command:
    """Adds the prompt (`TEXT`, or `--prompt TEXT`), `--prompt-file` and `--chat/--raw`."""
    command = _with_text(command)
    for option in (
        click.option(
            "--raw/--chat",
            "raw",
            default=False,
            help="Send the text as it is, or as a user's message laid out by the model's chat template (the default).",
        ),
        click.option("--system", help="System prompt, with --chat."),
        click.option(
            "--prompt-file",
            type=click.Path(path_type=Path, allow_dash=True),
            help="Read the prompt from a file, or from standard input with -.",
        ),
        click.option("--prompt", "-p", help="The prompt."),
    ):
        command = option(command)
    return command


def _with_text(command: Command) -> Command:
    """A prompt may also be the argument, which is what one writes first."""

    @functools.wraps(command)
    def taking(*arguments: Any, text: str | None, prompt: str | None, **options: Any) -> Any:
        if text is not None and prompt is not None:
            raise click.UsageError("give the prompt once: as the argument or by --prompt")
        return command(*arguments, prompt=prompt if text is None else text, **options)

    return cast(Command, click.argument("text", required=False)(taking))


def sampling_options(command: Command) -> Command:
    """Adds the options of sampling; the command receives them by the names that `Client.generate` takes."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def given(options: dict[str, Any]) -> RequestOptions:
    """What the user named, for `Client.generate`."""
    named = {name: value for name, value in options.items() if value is not None and value != ()}
    return cast(RequestOptions, named)  # the names are those of _SAMPLING


def read_prompt(
    prompt: str | None, prompt_file: Path | None, system: str | None, *, raw: bool
) -> str | list[dict[str, str]]:
    """The prompt in the form to send. Raises UsageError when there is none, an empty one, or two."""
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("give the prompt: TEXT, or --prompt-file FILE (- reads standard input)")
    if raw and system is not None:
        raise click.UsageError("--system belongs to --chat")
    text = prompt if prompt is not None else _read(prompt_file)
    if not text:
        raise click.UsageError(_nothing_to_send(prompt_file))
    if raw:
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]


def _nothing_to_send(path: Path | None) -> str:
    if path is None:
        return "the prompt is empty: there is nothing to send"
    return f"{'standard input' if str(path) == '-' else path} is empty: there is no prompt to send"


def write_text(text: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _read_grammar(path: str | None) -> str | None:
    return None if path is None else _read(Path(path))


def _read_bias(values: tuple[str, ...]) -> dict[int, float] | None:
    bias = {}
    for value in values:
        token_id, _, amount = value.partition("=")
        try:
            bias[int(token_id)] = float(amount)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=VALUE, two numbers") from None
    return bias or None


def _read(path: Path | None) -> str:
    assert path is not None
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode()
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path} is not UTF-8 (byte {error.start})") from None
