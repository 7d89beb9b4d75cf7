"""The prompt at the beginning of an answer, with the log probabilities of its tokens and where in it each stands."""

from __future__ import annotations

from collections.abc import Sequence

from radixfleet.text import Tokenizer
from radixfleet.types import TokenArray
from radixfleet.v1 import inference_pb2
from router.http.openai.logprobs import TokenPlaces, completion_logprobs, token_texts
from router.http.openai.shapes import CompletionLogprobs


class Echo:
    """Of one prompt."""

    def __init__(self, tokenizer: Tokenizer, tokens: TokenArray, text: str = "") -> None:
        """`text`: as the client wrote it, which lacks the BOS that tokenizing adds; empty: the client sent `tokens`."""
        self.text = text or tokenizer.decode(tokens, skip_special_tokens=False)
        self.logprobs: list[CompletionLogprobs] = []
        self._token_ids = tokens.tolist()
        self._texts = token_texts(tokenizer)
        self._num_told = 0
        spec = tokenizer.spec
        adds_bos = bool(text) and spec.add_bos and self._token_ids[:1] == [spec.bos_token_id]
        lacks_bos = adds_bos and not text.startswith(tokenizer.decode(tokens[:1], skip_special_tokens=False))
        self._places = TokenPlaces(tokenizer, num_unwritten=int(lacks_bos))

    def tell(self, logprobs: Sequence[inference_pb2.TokenLogprobs | None]) -> None:
        """Of the next tokens. As they come, run by run: those of a long prompt at once would stop the event loop."""
        token_ids = self._token_ids[self._num_told : self._num_told + len(logprobs)]
        self.logprobs.append(completion_logprobs(token_ids, logprobs, self._texts, self._places))
        self._num_told += len(token_ids)
