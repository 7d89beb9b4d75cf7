"""schemathesis: requests made from our OpenAPI document, right ones and wrong ones, until one is a fault of ours."""

from __future__ import annotations

import re

from tests.interop.case import Case, Context, Failed, run

_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
_EXAMPLES = 25


def _schemathesis(context: Context) -> str:
    python = context.python("schemathesis", ["schemathesis==4.32.5"])
    command = [str(python.parent / "schemathesis"), "run", f"http://{context.fleet.http}/openapi.json"]
    command += ["--checks", _CHECKS, "--max-examples", str(_EXAMPLES), "--phases", "examples,coverage,fuzzing"]
    command += ["--request-timeout", "30", "--no-color", "--seed", "1", "--exclude-path-regex", "^/health"]
    printed = run(command, cwd=context.output, timeout_s=1200)
    (context.output / "printed.txt").write_text(printed)
    counted = re.search(r"(\d+) generated", printed)
    if counted is None:
        raise Failed(f"nothing was run\n{printed[-2000:]}")
    return f"{counted[1]} requests, no 5xx and no answer that the document does not allow"


CASES = (Case("schemathesis", "schemathesis 4.32.5", "valid and invalid requests from /openapi.json", _schemathesis),)
