"""Log probabilities in OpenAI's two forms, and the texts of single tokens that they name.

A token alone need not be text: a character may lie across several, which then show as U+FFFD. What a token looks like
may depend on being the first (a space that is dropped there), so its text is what it adds behind another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

from radixfleet.output_text.detokenizer import Detokenizer
from radixfleet.text import Tokenizer
from radixfleet.v1 import inference_pb2
from router.http.openai.shapes import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

_ANCHOR = "a"


class TokenTexts:
    """Texts of one tokenizer's tokens; each is decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(_ANCHOR).tolist()
        self._tokenizer = tokenizer
        self._anchor = ids[-1:]
        self._anchor_text = tokenizer.decode(self._anchor, skip_special_tokens=False)
        self._known: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._decode(token_id)
        return text

    def _decode(self, token_id: int) -> str:
        together = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        if together.startswith(self._anchor_text):
            return together[len(self._anchor_text) :]
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


@lru_cache(maxsize=2)
def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """Those of a tokenizer; of the last two that were asked for, as they keep it alive. On the event loop only."""
    return TokenTexts(tokenizer)


class TokenPlaces:
    """Where the tokens of a text stand in it: each behind what those before it have made certain.

    So the tokens of one character stand together, and text that is held back from a client counts as text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        first: int = 0,
        num_unwritten: int = 0,
        context: Sequence[int] = (),
        skip_special_tokens: bool = False,
    ) -> None:
        """`first`: where the first stands. `num_unwritten`: so many at the beginning are not in the text. `context`:
        what it goes on from.
        """
        decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        invisible = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._detokenizer = Detokenizer(decode, invisible, context=context)
        self._place = first
        self._num_unwritten = num_unwritten

    def next(self, token_id: int) -> int:
        """Characters before the next token."""
        place = self._place
        if self._num_unwritten:
            self._num_unwritten -= 1
        else:
            self._place += len(self._detokenizer.push(token_id))
        return place


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[inference_pb2.TokenLogprobs], texts: TokenTexts
) -> ChatLogprobs:
    """One entry for each token."""
    return ChatLogprobs(
        [
            TokenLogprob(
                token=(text := texts[token_id]),
                logprob=entry.logprob,
                bytes=list(text.encode()),
                top_logprobs=[
                    TopLogprob((top := texts[top_id]), value, list(top.encode()))
                    for top_id, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
                ],
            )
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def completion_logprobs(
    token_ids: Iterable[int],
    logprobs: Iterable[inference_pb2.TokenLogprobs | None],
    texts: TokenTexts,
    places: TokenPlaces,
) -> CompletionLogprobs:
    """One entry for each token, the next of the text that `places` knows."""
    lists = CompletionLogprobs([], [], [], [])
    assert lists.top_logprobs is not None, "just made"
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = texts[token_id]
        lists.tokens.append(text)
        lists.text_offset.append(places.next(token_id))
        if entry is None:
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
            continue
        lists.token_logprobs.append(entry.logprob)
        tops = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        # Several tokens may have one text; the likeliest of them stands for it. The token itself is always told.
        lists.top_logprobs.append({text: entry.logprob} | {texts[top_id]: top for top_id, top in reversed(list(tops))})
    return lists


def joined_completion(pieces: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    """Of one text in pieces; None where there are none."""
    if not pieces:
        return None
    return CompletionLogprobs(
        [token for piece in pieces for token in piece.tokens],
        [value for piece in pieces for value in piece.token_logprobs],
        [top for piece in pieces for top in piece.top_logprobs or ()],
        [offset for piece in pieces for offset in piece.text_offset],
    )
