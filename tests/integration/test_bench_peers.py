"""The comparison with peers end to end: a real worker of ours, fake peers in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import torch

from deploy.bench.peers.catalog import Launch, Peer, Task
from deploy.bench.peers.comparison import OURS, figures
from deploy.bench.peers.guard import descendants
from deploy.bench.peers.questions import Questions
from deploy.bench.peers.run import compare_with_peers
from tests.support.processes import survivors
from tests.support.tiny_model import tiny_model
from worker.model.errors import UnsupportedModel

WORKLOADS = (Questions("shared", 4, 2, 32, 8, 6), Questions("alone", 2, 1, 0, 40, 6))


def fake(*options: str, module: str = "tests.support.fake_peer") -> Peer:
    def launch(folder: Path, task: Task, port: int) -> Launch:
        return Launch([sys.executable, "-m", module, "--port", str(port), *options], dtype="none")

    return Peer("fake 1.0", "fake", lambda folder: True, lambda folder, tell: None, launch)


def refusing(folder: Path, task: Task, port: int) -> Launch:
    raise UnsupportedModel("reads other files")


async def test_everybody_is_measured_failures_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    peers = {
        "good": fake(),
        "short": fake("--lacking", "2"),
        "dead": fake(module="tests.support.no_such_module"),
        "picky": Peer("picky 1.0", "fake", lambda folder: True, lambda folder, tell: None, refusing),
    }
    task = Task(tiny_model(), torch.float32, 1, 2, 46, tmp_path / "cache")
    seen: set[psutil.Process] = set()
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        seen.update(descendants(psutil.Process().pid))

    outcome = await compare_with_peers(peers, task, WORKLOADS, 2, tmp_path, tell)
    contestants = {each.name: each for each in outcome.contestants}
    assert list(contestants) == [OURS, *peers]
    for questions in WORKLOADS:
        rows = figures(outcome.contestants, questions)
        assert [row.name for row in rows] == [OURS, "good"]
        assert [row.rounds for row in rows] == [2, 2]
        assert rows[0].tokens_ratio == rows[0].ttft_ratio == rows[0].agreement == 1.0
        assert rows[1].tokens_per_s > 0
        for turn in contestants[OURS].turns[questions.name].values():
            assert [answer.output_tokens for answer in turn.answers] == [6] * questions.num_requests
    assert not contestants[OURS].failure
    assert "the server counted 40 + 4" in contestants["short"].failure
    assert "no_such_module" in contestants["dead"].failure
    assert contestants["picky"].failure == "reads other files"
    assert seen
    assert not survivors(list(seen))
