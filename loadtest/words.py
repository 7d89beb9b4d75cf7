"""Prompts as words, for servers that take no token ids: one word for each id, alike for alike ids.

The words are common enough that vocabularies of language models have each, with the space before it, as one token; so
what two prompts share stays shared, and lengths in tokens stay about what the workload says. What a server counted
stands in its usage.
"""

from __future__ import annotations

from radixfleet.types import TokenArray

_TEXT = (
    "the of and to in that was for on with as at by from this have which one had not but what all were when we there "
    "can out other about more than time people year day man thing woman life child world school state family student "
    "group country problem hand part place case week company system work night water room book story level"
)
WORDS = tuple(_TEXT.split())


def as_words(token_ids: TokenArray) -> str:
    """A space and a word for each id."""
    return " " + " ".join(WORDS[number] for number in (token_ids % len(WORDS)).tolist())
