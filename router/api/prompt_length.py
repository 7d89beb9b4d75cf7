"""Prompts that are too long, found out before they cost anything where that is possible.

Tokenizing takes about 1.4 us a token, so a text of 60 MB would hold a tokenizer's thread for twenty seconds, to be
refused afterwards. A token stands for no more characters than the longest of the vocabulary has: a text that has more
than that times the limit is refused as it came.
"""

from __future__ import annotations

from radixfleet.errors import InvalidRequest
from radixfleet.types import ChatPrompt


def check_text(prompt: str | ChatPrompt, longest_token: int, max_tokens: int) -> None:
    """Raises InvalidRequest for a text or a chat that has more than `max_tokens` tokens, however they fall."""
    if isinstance(prompt, str):
        num_characters = len(prompt)
    else:
        num_characters = sum(len(message.content) for message in prompt.messages)
    if num_characters > longest_token * max_tokens:
        raise InvalidRequest(
            f"the prompt has {num_characters:,} characters: more than {max_tokens:,} tokens, and no more are taken",
            field="prompt",
            max_tokens=str(max_tokens),
        )


def check_tokens(num_tokens: int, max_tokens: int) -> None:
    """Raises InvalidRequest for a prompt of more tokens."""
    if num_tokens > max_tokens:
        raise InvalidRequest(
            f"the prompt has {num_tokens:,} tokens; at most {max_tokens:,} are taken here",
            field="prompt",
            max_tokens=str(max_tokens),
        )
