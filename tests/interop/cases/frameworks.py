"""Libraries for agents and structured answers, for Python: each asks for an answer in text, and for a typed one.

Typed answers come by demanded calls of tools or by JSON schemas, as each library does by default. The model that
computes is random, so what is checked is their form.
"""

from __future__ import annotations

from tests.interop.case import HERE, Case, Context, run
from tests.interop.cases.openai_clients import until_idle

_PACKAGES = {
    "openai-agents": "openai-agents==0.24.0",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.68.0",
    "langchain": "langchain-openai==1.7.4",
    "llama-index": "llama-index-llms-openai-like==0.8.1",
    "instructor": "instructor==1.17.0",
}


def _case(name: str, what: str) -> Case:
    def run_it(context: Context) -> str:
        python = context.python(name, [_PACKAGES[name]])
        script = str(HERE / "python" / "frameworks.py")
        run([str(python), script, name], cwd=context.output, environment={"BASE_URL": context.fleet.url})
        until_idle(context.fleet)
        return ""

    version = _PACKAGES[name].partition("==")[2]
    return Case(name, f"{name} {version}", what, run_it)


CASES = (
    _case(
        "openai-agents",
        "an agent whole and streamed; a tool that must be called; a typed answer; by both of OpenAI's APIs",
    ),
    _case("pydantic-ai", "text whole and streamed; typed answers by a tool and by a schema"),
    _case(
        "langchain", "text whole, streamed and in a batch; typed answers by a call and by a schema; log probabilities"
    ),
    _case("llama-index", "text and chats, whole and streamed; a typed answer; a tool that must be called"),
    _case("instructor", "typed answers by tools and by a schema, whole and in parts"),
)
