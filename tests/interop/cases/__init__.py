"""All clients."""

from __future__ import annotations

from collections.abc import Mapping

from tests.interop.case import Case
from tests.interop.cases import evaluation, frameworks, grpc_clients, litellm, load_tools, openai_clients, schemathesis

CASES: Mapping[str, Case] = {
    case.name: case
    for module in (openai_clients, frameworks, litellm, load_tools, evaluation, grpc_clients, schemathesis)
    for case in module.CASES
}
