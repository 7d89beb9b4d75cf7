"""What comes over a wire is never code: nothing of ours unpickles, and weights are read as data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("proto", "router", "worker", "deploy", "loadtest")
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "jsonpickle"})
UNSAFE_CALLS = frozenset({"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"})


def dotted(node: ast.expr) -> str:
    """The name of what is called, such as "torch.load"."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def faults(source: str) -> Iterator[str]:
    """What in a module could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            yield from (f"import {name}" for name in modules if name.partition(".")[0] in UNSAFE_MODULES)
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            words = {word.arg: word.value for word in node.keywords}
            if name in UNSAFE_CALLS:
                yield name
            if name == "torch.load":
                only = words.get("weights_only")
                if not (isinstance(only, ast.Constant) and only.value is True):
                    yield f"{name} without weights_only=True"
            if name.endswith(("np.load", "numpy.load")) and "allow_pickle" in words:
                yield f"{name} with allow_pickle"
            if name.endswith((".send_pyobj", ".recv_pyobj")):
                yield name


def modules() -> list[Path]:
    return sorted(path for part in SOURCES for path in (ROOT / part).rglob("*.py") if "v1" not in path.parts)


def test_there_is_something_to_look_at() -> None:
    assert len(modules()) > 150


def test_nothing_that_we_read_is_run() -> None:
    found = {
        str(path.relative_to(ROOT)): problems
        for path in modules()
        if (problems := list(faults(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, cloudpickle as cp",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "socket.recv_pyobj()",
        "eval(text)",
        "yaml.load(text)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(faults(source))
