"""What the READMEs promise exists: commands and their options, files, links, reasons, the functions on a request's way.

Its metrics are checked on a live fleet (tests/integration/test_readme_metrics.py).
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

from deploy.command_line import COMMANDS, cli
from router.view import Reason

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
DOCUMENTS = {
    name: (ROOT / name).read_text()
    for name in (
        "README.md",
        "deploy/README.md",
        "router/README.md",
        "router/policies/TRIED.md",
        "worker/README.md",
        "tests/README.md",
    )
}
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EVERYTHING = "\n".join(DOCUMENTS.values())
LINKS = sorted({(name, link) for name, text in DOCUMENTS.items() for link in re.findall(r"\]\(([^)]+)\)", text)})


def anchors(text: str) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """Every `radixfleet` command line in a document, in fences and in the text, as words."""
    lines = [line for fence in FENCE.findall(text) for line in fence.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(radixfleet [^`]*)`", FENCE.sub("", text))
    for line in lines:
        found = re.search(r"(?:^|[ /])radixfleet ([a-z].*)", line.split(" # ")[0])
        if found:
            yield shlex.split(re.split(r" [|>] ", found[1])[0].rstrip(")"))


def known_options(words: list[str]) -> set[str]:
    """Options of the command that `words` begin with. Raises AssertionError when there is no such command."""
    command: click.Command = cli
    context = click.Context(cli)
    for word in words:
        if not isinstance(command, click.Group) or word.startswith("-"):
            break
        found = command.get_command(context, word)
        assert found or command.invoke_without_command, f"no command {word}"
        if not found:
            break
        command = found
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def defines(source: str, owner: str, function: str) -> bool:
    """Whether a class of this name, or a gRPC service's, has this function."""
    bodies = re.findall(rf"^class {owner}(?:Servicer)?\b.*?(?=^\S)", source + "\nend", re.DOTALL | re.MULTILINE)
    return any(re.search(rf"^    (?:async )?def {function}\(", body, re.MULTILINE) for body in bodies)


def test_every_command_is_in_the_readme():
    assert [name for name in COMMANDS if f"radixfleet {name}" not in README and f"make {name}" not in README] == []


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in commands(EVERYTHING)])
def test_every_command_line_is_one_that_the_command_takes(words):
    named = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert named - known_options(words) == set()


def test_every_script_that_the_readmes_run_is_there():
    modules = re.findall(r"(?:python -m |`)((?:tests|deploy)\.[\w.]+)", EVERYTHING)
    paths = re.findall(r"(?:python|pytest -s|pytest -m cluster) (tests/[\w/.]+)", EVERYTHING)
    assert len(modules) > 20
    assert len(paths) > 5
    missing = [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()]
    assert missing + [path for path in paths if not (ROOT / path).exists()] == []


def test_every_function_on_a_requests_way_is_in_the_code():
    way = README[README.index("## The life of a request") : README.index("### When something fails")]
    sources = [path.read_text() for room in ("router", "worker", "proto") for path in (ROOT / room).rglob("*.py")]
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", way)
    assert len(named) > 15
    absent = [each for each in named if not any(defines(text, *each) for text in sources)]
    assert absent == []
    alone = re.findall(r"`(_\w+)`", way)
    assert [name for name in alone if not any(f"def {name}(" in text for text in sources)] == []


def test_every_reason_of_a_choice_is_explained():
    reasons = set(get_args(Reason)) - {"none"}
    assert {reason for reason in reasons if f"`{reason}`" not in README} == set()


@pytest.mark.parametrize(("document", "link"), LINKS)
def test_every_link_leads_somewhere(document, link):
    if link.startswith("https://"):
        return
    path, _, anchor = link.partition("#")
    target = (ROOT / document).parent / path if path else ROOT / document
    assert target.exists()
    assert not anchor or anchor in anchors(target.read_text())


def test_the_client_example_is_short_and_compiles():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) < 30
    compile(example, "README.md", "exec")
