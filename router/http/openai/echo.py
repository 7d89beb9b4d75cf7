"""The prompt at the beginning of an answer, with the log probabilities of its tokens and where in it each stands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from radixfleet.output_text.detokenizer import Detokenizer
from radixfleet.text import Tokenizer
from radixfleet.types import TokenArray
from radixfleet.v1 import inference_pb2
from router.http.openai.logprobs import completion_logprobs, token_texts
from router.http.openai.shapes import CompletionLogprobs


class Echo:
    """Of one prompt. A token stands behind the text that the tokens before it have made certain."""

    def __init__(self, tokenizer: Tokenizer, tokens: TokenArray, text: str = "") -> None:
        """`text`: as the client wrote it, which lacks the BOS that tokenizing adds; empty: the client sent `tokens`."""
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        self.text = text or decode(tokens)
        self.logprobs: list[CompletionLogprobs] = []
        self._token_ids = tokens.tolist()
        self._texts = token_texts(tokenizer)
        self._detokenizer = Detokenizer(decode)
        self._num_told = 0
        self._num_characters = 0
        spec = tokenizer.spec
        adds_bos = bool(text) and spec.add_bos and tokens[:1].tolist() == [spec.bos_token_id]
        self._num_unwritten = int(adds_bos and not text.startswith(decode(tokens[:1])))

    def tell(self, logprobs: Sequence[inference_pb2.TokenLogprobs | None]) -> None:
        """Of the next tokens. As they come, run by run: those of a long prompt at once would stop the event loop."""
        token_ids = self._token_ids[self._num_told : self._num_told + len(logprobs)]
        told = completion_logprobs(token_ids, logprobs, self._texts, 0)
        told.text_offset = [self._place(token_id) for token_id in token_ids]
        self.logprobs.append(told)

    def _place(self, token_id: int) -> int:
        place = self._num_characters
        if self._num_told >= self._num_unwritten:
            self._num_characters += len(self._detokenizer.push(token_id))
        self._num_told += 1
        return place
