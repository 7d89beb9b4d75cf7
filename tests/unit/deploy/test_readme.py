"""What the README promises exists: commands, reasons, files. Its metrics are checked on a live fleet."""

import re
from pathlib import Path
from typing import get_args

import pytest

from deploy.command_line import COMMANDS
from router.view import Reason

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def test_every_command_is_in_the_readme():
    assert [name for name in COMMANDS if f"radixfleet {name}" not in README and f"make {name}" not in README] == []


def test_every_reason_of_a_choice_is_explained():
    reasons = set(get_args(Reason)) - {"none"}
    assert {reason for reason in reasons if f"`{reason}`" not in README} == set()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#][^)]*)\)", README))))
def test_every_link_leads_somewhere(link):
    assert link.startswith("https://") or (ROOT / link).exists()


def test_the_client_example_is_short_and_compiles():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) < 30
    compile(example, "README.md", "exec")
