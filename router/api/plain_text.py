"""Prompts whose tokens are not known, because the engines of their model do not tell their tokenizer.

Four bytes of the text stand for a token, as in English they about do; so lengths and loads are right to within a
factor, and equal beginnings have equal hashes, which is all that routing needs. These numbers leave the router nowhere:
the engine is sent the text itself.
"""

from __future__ import annotations

import numpy as np

from radixfleet.types import TokenArray
from radixfleet.v1 import inference_pb2
from router.dialects.http_words import canonical_text

_BYTES_A_TOKEN = 4


def stand_ins(prompt: inference_pb2.Prompt) -> TokenArray:
    """What takes the place of the tokens of a text or a chat; empty for an empty text."""
    text = prompt.text if prompt.WhichOneof("form") == "text" else canonical_text(prompt.chat)
    data = text.encode()
    return np.frombuffer(data + bytes(-len(data) % _BYTES_A_TOKEN), dtype="<u4").astype(np.uint32, copy=False)


def text_of(tokens: TokenArray) -> str:
    """The text that stand-ins were made of, for people to look at."""
    return tokens.astype("<u4", copy=False).tobytes().rstrip(b"\0").decode(errors="replace")
