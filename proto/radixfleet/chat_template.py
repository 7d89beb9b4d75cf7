"""Chat templates: the model's own jinja2 text that lays out messages as a prompt, run in a sandbox.

The environment is the one that Hugging Face templates are written for. A template comes with the model and the messages
from a client; neither may reach attributes or change what it is given, and whatever goes wrong is an InvalidRequest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from radixfleet.errors import InvalidRequest
from radixfleet.types import ChatPrompt

_FIELD = "prompt.chat"
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""What a template can raise by itself or by what it calls."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Rendering is safe from many threads."""

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`now` answers the templates that print today's date. Raises InvalidRequest when `source` is not jinja2."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self._fixed = {"bos_token": bos_token, "eos_token": eos_token, "documents": None}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template cannot be read: {error}", field=_FIELD) from error

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt as text. Raises InvalidRequest when the template refuses the messages or fails on them."""
        messages = [{"role": message.role, "content": message.content, **message.extra} for message in prompt.messages]
        variables = {
            **self._fixed,
            **prompt.variables,
            "messages": messages,
            "add_generation_prompt": prompt.add_generation_prompt,
            "tools": list(prompt.tools) or None,
        }
        try:
            return self._template.render(variables)
        except _FAILURES as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", field=_FIELD) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
