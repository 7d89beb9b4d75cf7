"""LiteLLM's proxy as a gateway before our router."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from deploy.bench.peers.servers import free_port
from tests.interop.case import Case, Context, Failed
from tests.interop.engines import process, until

_VERSION = "1.108.7"
_KEY = "sk-0123456789abcdef0123456789abcdef"
_MESSAGES = [{"role": "user", "content": "Tell me about the weather in Paris."}]
_TOOL = {"type": "function", "function": {"name": "now"}}


def _litellm(context: Context) -> str:
    python = context.python("litellm", [f"litellm[proxy]=={_VERSION}"])
    models = [
        {"model_name": name, "litellm_params": {"model": f"hosted_vllm/{name}", "api_base": context.fleet.url}}
        for name in ("tiny", "computed")
    ]
    config = context.output / "config.json"
    config.write_text(json.dumps({"model_list": models}))
    port = free_port()
    command = [str(python.parent / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    variables = {"LITELLM_MASTER_KEY": _KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOSTED_VLLM_API_KEY": "none"}
    log = context.output / "proxy.log"
    with process([*command, "--telemetry", "False"], log, variables) as proxy:
        url = f"http://127.0.0.1:{port}"
        until(lambda: proxy.poll() is not None or _answers(url), f"the proxy listens; see {log}", 240)
        _asked(url)
    return ""


def _asked(url: str) -> None:
    asked = {"model": "tiny", "messages": _MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = json.loads(_post(url, "/v1/chat/completions", asked))
    if whole["usage"]["completion_tokens"] != 12:
        raise Failed(f"a chat: {whole}")
    streamed = _post(url, "/v1/chat/completions", {**asked, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    if text != whole["choices"][0]["message"]["content"]:
        raise Failed(f"a stream: {streamed[:2000]}")
    demanded = {**asked, "model": "computed", "max_tokens": 400, "tools": [_TOOL], "tool_choice": "required"}
    answer = json.loads(_post(url, "/v1/chat/completions", {**demanded, "parallel_tool_calls": False}))
    if answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] != "now":
        raise Failed(f"a demanded call: {answer}")
    message = json.loads(_post(url, "/v1/messages", asked))
    if message["usage"]["output_tokens"] != 12:
        raise Failed(f"a message in Anthropic's form: {message}")
    question = {
        "model": "tiny",
        "input": "Tell me about the weather in Paris.",
        "max_output_tokens": 16,
    }  # or more, for LiteLLM
    response = json.loads(_post(url, "/v1/responses", question))
    if response["usage"]["output_tokens"] != 16 or response["status"] != "incomplete":
        raise Failed(f"a response: {response}")
    told = _post(url, "/v1/responses", {**question, "stream": True})
    if "response.output_text.delta" not in told or "response.incomplete" not in told:
        raise Failed(f"a streamed response: {told[:2000]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/liveliness", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _post(url: str, path: str, body: Mapping[str, Any]) -> str:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: bytes = response.read()
    except OSError as error:
        raise Failed(f"{path}: {error}") from error
    return answer.decode()


CASES = (
    Case(
        "litellm",
        f"LiteLLM {_VERSION}",
        "its proxy: chats, streams, a demanded call, Anthropic's messages, responses",
        _litellm,
    ),
)
