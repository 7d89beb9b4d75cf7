"""Each behaviour of tests/BEHAVIOURS.md is named by a test, and each that a test names is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMED = re.compile(r"[Bb]ehaviours?\s+(\d+(?:(?:,\s*|\s+and\s+|,\s+and\s+)\d+)*)")


def numbers_in(text: str) -> set[int]:
    return {int(number) for named in NAMED.findall(text) for number in re.findall(r"\d+", named)}


def docstrings_of_tests(source: str) -> Iterator[str]:
    """Those of test functions, and of the modules and classes that have some."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef) and not any(map(is_test, ast.walk(node))):
            continue
        if isinstance(node, ast.Module | ast.ClassDef) or is_test(node):
            yield ast.get_docstring(node) or ""


def is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def test_numbers_are_read_as_they_are_written():
    assert numbers_in("Behaviour 6: a.  Behaviours 10, 24 and 25.\nBehaviours 50 and 51") == {6, 10, 24, 25, 50, 51}


def test_every_behaviour_is_shown_by_a_test_and_no_other_is_named():
    listed = re.findall(r"^(\d+)\. ", (TESTS / "BEHAVIOURS.md").read_text(), re.MULTILINE)
    assert listed == [str(number) for number in range(1, len(listed) + 1)]
    sources = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    named = [numbers_in(text) for source in sources if "ehaviour" in source for text in docstrings_of_tests(source)]
    assert set().union(*named) == set(map(int, listed))
