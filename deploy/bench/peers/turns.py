"""A turn: one workload on one server that has nothing else to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from deploy.bench.peers.clients import Answer, Asks, WrongAnswer
from deploy.bench.peers.questions import Questions
from radixfleet.types import TokenArray

_OPENING_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of it. Answers in the order of the prompts."""

    duration_s: float
    """From the first question to the last answer's end."""
    answers: Sequence[Answer]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests."""
        return sum(answer.output_tokens for answer in self.answers) / self.duration_s

    @property
    def ttft_p50_s(self) -> float:
        """Median time to the first token."""
        return median(answer.first_token_s for answer in self.answers)

    @property
    def inter_token_s(self) -> float:
        """Time between two tokens of an answer: the mean of each, and of these the median."""
        return median(
            (answer.end_s - answer.first_token_s) / max(1, answer.output_tokens - 1) for answer in self.answers
        )

    def agreement(self, other: Turn) -> float:
        """Share of the answers that begin alike: near 1 where weights are the same, up to how numbers are rounded."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(opening(one) == opening(two) for one, two in pairs) / len(self.answers)


def opening(answer: Answer) -> str:
    """The first two words or so."""
    return answer.text[:_OPENING_CHARACTERS]


async def take(server: Asks, questions: Questions, prompts: Sequence[TokenArray], limit_s: float) -> Turn:
    """Ask all. Raises WrongAnswer when one answer fails or has another length, or the turn takes longer."""
    answers: list[Answer | None] = [None] * len(prompts)
    left = iter(enumerate(prompts))

    async def ask_one_after_another() -> None:
        for place, prompt in left:
            answers[place] = _checked(await server.ask(prompt, questions.new_tokens), questions)

    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(limit_s):
            await _together(min(questions.concurrency, len(prompts)), ask_one_after_another)
    except TimeoutError:
        raise WrongAnswer(f"{questions.name} took longer than {limit_s:g} s") from None
    return Turn(time.perf_counter() - began_s, [answer for answer in answers if answer is not None])


async def _together(count: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The first failure ends all and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except* WrongAnswer as failures:
        first = failures.exceptions[0]
        raise WrongAnswer(str(first)) from first


def _checked(answer: Answer, questions: Questions) -> Answer:
    asked = (questions.prompt_tokens, questions.new_tokens)
    if (answer.prompt_tokens, answer.output_tokens) != asked:
        raise WrongAnswer(
            f"asked for {asked[0]} + {asked[1]} tokens, the server counted {answer.prompt_tokens} + "
            f"{answer.output_tokens}"
        )
    return answer
