"""What everybody is asked. The same seed gives the same prompts: plain token ids, taken as they are by every engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer

from radixfleet.types import TokenArray
from worker.model.errors import UnsupportedModel

_WORD = re.compile(r"[Ġ▁][a-z]{3,}")
_LEAST_WORDS = 20


@dataclass(frozen=True, slots=True)
class Questions:
    """Requests in closed loop: so many at once, the next when one has ended. Every answer goes on to its length."""

    name: str
    num_requests: int
    concurrency: int
    prefix_tokens: int
    """The same ones at the head of every prompt."""
    unique_tokens: int
    new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt."""
        return self.prefix_tokens + self.unique_tokens

    @property
    def text(self) -> str:
        """For people."""
        shared = f"{self.prefix_tokens} shared + " if self.prefix_tokens else ""
        each = f"{shared}{self.unique_tokens} tokens in, {self.new_tokens} out"
        return f"{self.name}: {self.num_requests} requests, {self.concurrency} at a time, {each}"

    def warm_up(self) -> Questions:
        """So many requests as run at once, with short answers."""
        return replace(
            self,
            name="warm-up",
            num_requests=self.concurrency,
            prefix_tokens=0,
            unique_tokens=self.prompt_tokens,
            new_tokens=min(_WARM_UP_TOKENS, self.new_tokens),
        )

    def prompts(self, words: TokenArray, seed: int) -> list[TokenArray]:
        """Prompts that no other seed gives: what an engine caches serves within a turn alone."""
        random = np.random.default_rng((seed, self.prefix_tokens, self.concurrency))
        prefix = random.choice(words, self.prefix_tokens)
        tails = random.choice(words, (self.num_requests, self.unique_tokens))
        return [np.concatenate([prefix, tail]) for tail in tails]


QUESTIONS = (
    Questions("shared prefix", 32, 8, 512, 64, 64),
    Questions("nothing shared", 32, 8, 0, 576, 64),
    Questions("one stream", 8, 1, 0, 576, 64),
)
_WARM_UP_TOKENS = 8


def longest(questions: Sequence[Questions]) -> int:
    """The most tokens that a request comes to have."""
    return max(each.prompt_tokens + each.new_tokens for each in questions)


def words_of(tokenizer: Tokenizer) -> TokenArray:
    """Tokens that are plain words: no engine holds back their text, as it must with a part of a character.

    Raises UnsupportedModel where there are too few.
    """
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    words = np.array(sorted(index for token, index in vocabulary.items() if _WORD.fullmatch(token)), np.uint32)
    if len(words) < _LEAST_WORDS:
        raise UnsupportedModel("this model's vocabulary has too few words in Latin letters to make prompts of")
    return words
