"""Turns in alternation, and the figures made of them.

Each round asks every workload of everybody, one server after another, while the others are frozen; who begins changes
with every turn. A peer's ratio is to our turn in the same round, so that a machine that is slower for a while does not
favour anybody; what is told is the median over the rounds. A peer that takes long for a turn has had its only one.
One that fails is out, and told with its reason; if ours fails, the run does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import msgspec

from deploy.bench.medians import Interval, median_interval
from deploy.bench.peers.clients import Asks, WrongAnswer
from deploy.bench.peers.questions import Questions
from deploy.bench.peers.servers import ServerFailed
from deploy.bench.peers.turns import Turn, take
from deploy.progress import Tell
from radixfleet.types import TokenArray

OURS = "radixfleet"
LONG_TURN_S = 25.0
TURN_LIMIT_S = 300.0
_WARM_UP_SEED = 1 << 20


class Serving(Protocol):
    """A server as far as alternation needs it."""

    def freeze(self) -> None:
        """Take no processor time until `thaw`."""
        ...

    def thaw(self) -> None:
        """Go on."""
        ...

    def obituary(self, how: str) -> str:
        """What to tell of a failure."""
        ...


@dataclass(slots=True, eq=False)
class Contestant:
    """One server of the run."""

    name: str
    title: str
    dtype: str
    asks: Asks
    serving: Serving
    once: bool = False
    """One round will do."""
    failure: str = ""
    turns: dict[str, dict[int, Turn]] = field(default_factory=dict)
    """By workload and round."""

    def wants(self, questions: Questions, index: int) -> bool:
        """Whether it takes part in this round of a workload."""
        before = self.turns.get(questions.name, {})
        long = any(turn.duration_s > LONG_TURN_S for turn in before.values())
        return not self.failure and not (index and (self.once or long))


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant on one workload: medians over its rounds. Ratios are to ours in the same rounds.

    Intervals are those of the median ratios, at 95 % confidence; None with fewer than six rounds.
    """

    name: str
    rounds: int
    tokens_per_s: float
    tokens_ratio: float
    tokens_interval: Interval | None
    ttft_p50_ms: float
    ttft_ratio: float
    ttft_interval: Interval | None
    inter_token_ms: float
    agreement: float
    """Share of the answers that begin as ours do."""

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


async def alternate(
    contestants: Sequence[Contestant],
    workloads: Sequence[Questions],
    words: TokenArray,
    rounds: int,
    tell: Tell,
) -> None:
    """Fill in the turns. All are frozen but ours when it begins, and when it ends. Raises WrongAnswer for ours."""
    turn = 0
    for index in range(rounds):
        for questions in workloads:
            prompts = questions.prompts(words, seed=index)
            start = turn % len(contestants)
            turn += 1
            for contestant in (*contestants[start:], *contestants[:start]):
                if contestant.wants(questions, index):
                    tell(f"round {index + 1} of {rounds}, {questions.name}: {contestant.name}")
                    await _take_one(contestant, questions, prompts, index)
                    tell(f"round {index + 1} of {rounds}, {questions.name}: {_outcome(contestant, questions, index)}")


async def warm_up(contestant: Contestant, questions: Questions, words: TokenArray) -> None:
    """A turn that does not count: what compiles at its first use has done so."""
    if not contestant.failure:
        await _take_one(contestant, questions, questions.prompts(words, seed=_WARM_UP_SEED), None)


async def _take_one(
    contestant: Contestant, questions: Questions, prompts: Sequence[TokenArray], index: int | None
) -> None:
    contestant.serving.thaw()
    try:
        turn = await take(contestant.asks, questions, prompts, TURN_LIMIT_S)
        if index is not None:
            contestant.turns.setdefault(questions.name, {})[index] = turn
    except (WrongAnswer, ServerFailed) as error:
        if contestant.name == OURS:
            raise
        contestant.failure = contestant.serving.obituary(f"{questions.name}: {error}")
    finally:
        contestant.serving.freeze()


def _outcome(contestant: Contestant, questions: Questions, index: int) -> str:
    if contestant.failure:
        return f"{contestant.name} failed"
    turn = contestant.turns[questions.name][index]
    return f"{contestant.name}: {turn.tokens_per_s:.0f} tokens/s, first token {1e3 * turn.ttft_p50_s:.0f} ms"


def figures(contestants: Sequence[Contestant], questions: Questions) -> list[Figures]:
    """Of all that did not fail, in their order. The first is ours."""
    reference = contestants[0].turns[questions.name]
    return [
        _figures(contestant.name, contestant.turns[questions.name], reference)
        for contestant in contestants
        if not contestant.failure and contestant.turns.get(questions.name)
    ]


def _figures(name: str, turns: Mapping[int, Turn], reference: Mapping[int, Turn]) -> Figures:
    pairs = [(turn, reference[index]) for index, turn in turns.items()]
    tokens_ratios = [turn.tokens_per_s / ours.tokens_per_s for turn, ours in pairs]
    ttft_ratios = [turn.ttft_p50_s / ours.ttft_p50_s for turn, ours in pairs]
    return Figures(
        name=name,
        rounds=len(turns),
        tokens_per_s=median(turn.tokens_per_s for turn in turns.values()),
        tokens_ratio=median(tokens_ratios),
        tokens_interval=median_interval(tokens_ratios),
        ttft_p50_ms=median(1e3 * turn.ttft_p50_s for turn in turns.values()),
        ttft_ratio=median(ttft_ratios),
        ttft_interval=median_interval(ttft_ratios),
        inter_token_ms=median(1e3 * turn.inter_token_s for turn in turns.values()),
        agreement=median(turn.agreement(ours) for turn, ours in pairs),
    )
