"""The demo's conversations."""

from __future__ import annotations

import asyncio
import io
from typing import Any, cast

import psutil
import pytest
from rich.console import Console

from deploy.commands.demo import _conversations
from deploy.demo_script import PERSONAS
from deploy.machine import load_of_others, num_cores
from radixfleet.client import Client
from tests.support.waiting import until


class _Silent:
    """A client whose answers do not come."""

    def __init__(self) -> None:
        self.asked = self.cancelled = 0

    async def complete(self, *_: Any, **__: Any) -> None:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def test_a_demo_that_is_interrupted_leaves_no_question_behind() -> None:
    client = _Silent()
    talking = asyncio.create_task(_conversations(cast("Client", client), Console(file=io.StringIO()), 8))
    await until(lambda: client.asked == 2)
    talking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talking
    assert client.cancelled == 2


async def test_a_question_begins_beside_its_name_and_no_line_is_longer_than_the_terminal() -> None:
    name, question = PERSONAS[0].name, PERSONAS[0].questions[0]
    shown, width = io.StringIO(), len(question)
    talking = asyncio.create_task(_conversations(cast("Client", _Silent()), Console(file=shown, width=width), 8))
    await until(lambda: bool(shown.getvalue()))
    talking.cancel()
    await asyncio.gather(talking, return_exceptions=True)
    lines = shown.getvalue().splitlines()
    assert " ".join(lines).split() == f"{name} {question}".split()
    assert max(map(len, lines)) <= width


def test_a_machine_is_busy_when_more_runs_than_it_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for load, told in ((num_cores() - 0.5, None), (num_cores() + 3.0, num_cores() + 3.0)):
        monkeypatch.setattr(psutil, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert load_of_others() == told
