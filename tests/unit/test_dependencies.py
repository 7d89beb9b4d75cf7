"""What the packages import is what their wheel depends on: the tests' own environment has much more."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("proto/radixfleet", "router", "worker", "deploy", "loadtest")
OWN = {Path(package).name for package in PACKAGES}
WITH_PYDANTIC = {"annotated_types", "pydantic_core"}
FOR_DEVELOPERS = {"grafana_foundation_sdk", "transformers", "_typeshed"}
"""The dashboards' source, a server to compare with, and types."""


def imported() -> Iterator[str]:
    """The packages of others, by the names that they are imported by."""
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def named(requirements: list[str]) -> set[str]:
    """The distributions that requirements name, as importlib spells them."""
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {name.group().lower().replace("-", "_") for name in names if name}


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for extra, listed in project["optional-dependencies"].items() if extra != "dev" for each in listed]
    declared = named([*project["dependencies"], *extras])
    distributions = packages_distributions()
    others = set(imported()) - sys.stdlib_module_names - OWN - WITH_PYDANTIC - FOR_DEVELOPERS
    missing = {name for name in others if not named(distributions.get(name, [name])) & declared}
    assert missing == set()
