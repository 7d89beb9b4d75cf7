"""Prompts that are too long are refused, and where their size alone tells, before they are tokenized."""

from __future__ import annotations

import pytest

from radixfleet.errors import InvalidRequest
from radixfleet.text import Tokenizer
from radixfleet.types import ChatMessage, ChatPrompt
from router.api.prompt_length import check_text, check_tokens
from tests.support.byte_tokenizer import byte_spec


@pytest.mark.parametrize(
    ("prompt", "refused"),
    [
        ("x" * 30, False),
        ("x" * 31, True),
        ("é" * 30, False),
        (ChatPrompt((ChatMessage("system", "x" * 20), ChatMessage("user", "x" * 10))), False),
        (ChatPrompt((ChatMessage("system", "x" * 20), ChatMessage("user", "x" * 11))), True),
    ],
)
def test_a_text_that_cannot_fit_is_refused_as_it_came(prompt: str | ChatPrompt, refused: bool) -> None:
    if not refused:
        check_text(prompt, longest_token=3, max_tokens=10)
        return
    with pytest.raises(InvalidRequest, match="31 characters: more than 10 tokens") as caught:
        check_text(prompt, longest_token=3, max_tokens=10)
    assert (caught.value.field, caught.value.metadata) == ("prompt", {"max_tokens": "10"})


def test_tokens_are_counted_to_the_last() -> None:
    check_tokens(10, 10)
    with pytest.raises(InvalidRequest, match="11 tokens; at most 10"):
        check_tokens(11, 10)


def test_no_token_stands_for_more_text_than_the_longest() -> None:
    tokenizer = Tokenizer(byte_spec())
    for text in ("hello there", "é" * 9, "<|end|>" * 5, " " * 50):
        assert len(text) <= tokenizer.longest_token * len(tokenizer.encode(text))
