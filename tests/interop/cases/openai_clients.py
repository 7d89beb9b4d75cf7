"""Libraries that speak OpenAI's API, for Node. (The one for Python is part of the test suite.)"""

from __future__ import annotations

import shutil

from tests.interop.case import HERE, Case, Context, Failed, run
from tests.interop.fleet import LiveFleet
from tests.support.waiting import wait_until

_VERSIONS = {"openai": "7.59.0", "ai": "7.0.173", "@ai-sdk/openai-compatible": "3.0.92"}
_LEAVE_S = 5.0


def _script(context: Context, name: str) -> None:
    folder = context.node("openai-node", _VERSIONS)
    script = shutil.copy(HERE / "node" / name, folder / name)
    run(["node", str(script)], cwd=folder, environment={"BASE_URL": context.fleet.url}, timeout_s=120)


def _openai(context: Context) -> str:
    _script(context, "openai_client.mjs")
    until_idle(context.fleet)
    return ""


def _ai_sdk(context: Context) -> str:
    _script(context, "ai_sdk.mjs")
    return ""


def until_idle(fleet: LiveFleet) -> None:
    """Wait until requests whose clients left have ended. Raises Failed."""
    try:
        wait_until(lambda: not fleet.metric("radixfleet_router_requests_in_flight"), timeout_s=_LEAVE_S)
    except AssertionError:
        raise Failed(f"requests go on {_LEAVE_S:.0f} s after their clients left") from None


CASES = (
    Case(
        "openai-node",
        f"openai {_VERSIONS['openai']} for Node",
        "models; chats, completions and responses, whole and streamed; a demanded call; usage; "
        "n; log probabilities; errors; leaving",
        _openai,
        needs=("node", "npm"),
    ),
    Case(
        "ai-sdk",
        f"@ai-sdk/openai-compatible {_VERSIONS['@ai-sdk/openai-compatible']}",
        "generateText, streamText, a demanded call, completions, usage, errors",
        _ai_sdk,
        needs=("node", "npm"),
    ),
)
