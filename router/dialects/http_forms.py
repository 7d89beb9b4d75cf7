"""The forms in which a request can be sent over OpenAI's HTTP: as token ids, as text, as a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixfleet import convert
from radixfleet.errors import InvalidRequest
from radixfleet.types import SamplingParams
from radixfleet.v1 import inference_pb2
from router.dialects.continued import rest_of
from router.dialects.http_words import Kind, chat_fields, sampling_fields

_DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class HttpForm:
    """One of them."""

    path: str
    """Behind the engine's base address."""
    fields: dict[str, Any]
    """Of the body, but for those that all requests have."""
    has_ids: bool = False


@dataclass(frozen=True, slots=True)
class HttpForms:
    """What one engine can be sent."""

    kind: Kind
    max_context_tokens: int | None
    takes_ids: bool
    """False: it has refused token ids before."""

    def of(
        self, request: inference_pb2.GenerateRequest, sampling: SamplingParams, source: inference_pb2.Prompt | None
    ) -> Sequence[HttpForm]:
        """The forms of a request, the best first; `source`: its prompt as the client sent it. Raises InvalidRequest."""
        original = source or request.prompt
        form = original.WhichOneof("form")
        forms: list[HttpForm] = []
        if request.prompt.WhichOneof("form") == "token_ids" and self.takes_ids:
            forms.append(self._ids(request, sampling))
        if request.generated.packed and not forms:
            raise InvalidRequest("the engine that was chosen cannot go on with an answer", field="generated")
        if form == "text":
            fields = self._fields(request, sampling, is_chat=False) | {"max_tokens": limit_of(sampling)}
            forms.append(HttpForm("/completions", {"prompt": original.text, **fields}))
        elif form == "chat":
            self._add_chat(forms, request, sampling, original.chat)
        if not forms:
            raise InvalidRequest("the engine that was chosen takes no token ids: send text", field="prompt.token_ids")
        return forms

    def _add_chat(
        self,
        forms: list[HttpForm],
        request: inference_pb2.GenerateRequest,
        sampling: SamplingParams,
        chat: inference_pb2.Chat,
    ) -> None:
        try:
            form = HttpForm("/chat/completions", chat_fields(chat) | self._chat_fields(request, sampling))
        except InvalidRequest:
            if not forms:
                raise
            return
        # Without a limit, only the engine knows what its context leaves.
        is_first = sampling.max_new_tokens is None and not request.generated.packed
        forms.insert(0 if is_first else len(forms), form)

    def _ids(self, request: inference_pb2.GenerateRequest, sampling: SamplingParams) -> HttpForm:
        prompt = convert.unpack_tokens(request.prompt.token_ids, "prompt.token_ids").tolist()
        generated = convert.unpack_tokens(request.generated, "generated").tolist()
        rest = rest_of(sampling, limit_of(sampling), len(generated))
        fields = self._fields(request, rest, is_chat=False)
        return HttpForm("/completions", {"prompt": prompt + generated, **fields}, has_ids=True)

    def _chat_fields(self, request: inference_pb2.GenerateRequest, sampling: SamplingParams) -> dict[str, Any]:
        fields = self._fields(request, sampling, is_chat=True)
        tokens = len(request.prompt.token_ids.packed) // 4
        if tokens + (sampling.max_new_tokens or 0) >= (self.max_context_tokens or 2**31):
            # As much as fits: what that is, the engine's own template decides.
            fields.pop("max_tokens", None)
        return fields

    def _fields(
        self, request: inference_pb2.GenerateRequest, sampling: SamplingParams, *, is_chat: bool
    ) -> dict[str, Any]:
        salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
        return sampling_fields(self.kind, sampling, is_chat=is_chat) | salt


def limit_of(sampling: SamplingParams) -> int:
    """New tokens that are asked for where the prompt is token ids or text, as engines would assume few."""
    return sampling.max_new_tokens if sampling.max_new_tokens is not None else _DEFAULT_MAX_NEW_TOKENS
