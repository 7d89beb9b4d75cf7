"""From the fleet's replies to the pieces of OpenAI's answers, which are streamed as they are or put together.

A request has n choices for each of its prompts; those of prompt p are number p * n to p * n + n - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from msgspec import UNSET

from radixfleet import convert
from radixfleet.errors import Unavailable
from radixfleet.output_text.detokenizer import CONTEXT_TOKENS
from radixfleet.types import FinishReason as Ending
from radixfleet.v1 import inference_pb2
from router.api.preparing import ServedModel
from router.dispatch.request import PreparedRequest
from router.http.openai.echo import Echo
from router.http.openai.logprobs import (
    TokenPlaces,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    joined_completion,
    token_texts,
)
from router.http.openai.shapes import (
    ChatDelta,
    ChatPart,
    CompletionPart,
    FinishReason,
    PromptTokensDetails,
    Usage,
)
from router.http.openai.tool_calls import Found, ToolCallFinder

Part: TypeAlias = ChatPart | CompletionPart


@dataclass(slots=True)
class Meter:
    """Counts the tokens of one prompt's choices."""

    prompt_tokens: int = 0
    cached_tokens: int | None = 0
    """None: the engine does not tell."""
    completion_tokens: int = 0

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        """Count a reply. The last one of a prompt has the worker's own numbers."""
        kind = message.WhichOneof("event")
        if kind == "delta":
            self.completion_tokens += len(message.delta.token_ids) or int(bool(message.delta.text))
        elif kind == "started":
            self.prompt_tokens = message.started.prompt_tokens
            self.cached_tokens = None if message.started.counts_follow else message.started.cached_tokens
        elif kind == "finished" and message.finished.HasField("usage"):
            usage = message.finished.usage
            self.prompt_tokens = usage.prompt_tokens
            self.cached_tokens = None if usage.cached_tokens_unknown else usage.cached_tokens
            self.completion_tokens = usage.completion_tokens


def usage_of(meters: Sequence[Meter]) -> Usage:
    """Of all prompts of a request together."""
    prompt = sum(meter.prompt_tokens for meter in meters)
    completion = sum(meter.completion_tokens for meter in meters)
    told = [meter.cached_tokens for meter in meters if meter.cached_tokens is not None]
    details = PromptTokensDetails(sum(told)) if told else UNSET
    return Usage(prompt, completion, prompt + completion, details)


class Choices(Protocol):
    """The choices of one prompt."""

    meter: Meter

    def begin(self, request: PreparedRequest, model: ServedModel) -> None:
        """The prompt is tokenized."""
        ...

    def take(self, message: inference_pb2.GenerateResponse) -> Sequence[Part]:
        """The pieces that a reply brings. Raises Unavailable where the worker broke the answer off."""
        ...


class ChatChoices:
    """Of a chat."""

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        """`tool_names`: of the tools that the model was shown; calls are looked for where there are any."""
        self.meter = Meter()
        self._tool_names = tool_names
        self._finders: dict[int, ToolCallFinder] = {}
        """Of the choices that have begun; unused where there are no tools."""
        self._texts: TokenTexts | None = None

    def begin(self, request: PreparedRequest, model: ServedModel) -> None:
        """See `Choices`."""
        if request.message.sampling.HasField("logprobs"):
            self._texts = token_texts(model.known_tokenizer)

    def take(self, message: inference_pb2.GenerateResponse) -> list[ChatPart]:
        """See `Choices`. The role comes first, alone."""
        self.meter.take(message)
        kind = message.WhichOneof("event")
        if kind not in ("delta", "finished"):
            return []
        parts = []
        if message.index not in self._finders:
            self._finders[message.index] = ToolCallFinder(self._tool_names)
            parts.append(ChatPart(message.index, ChatDelta(role="assistant", content="")))
        if kind == "delta":
            return [*parts, *self._delta(message.index, message.delta)]
        return [*parts, *self._end(message.index, message.finished)]

    def _delta(self, index: int, delta: inference_pb2.Delta) -> list[ChatPart]:
        logprobs = None
        if self._texts is not None and delta.token_ids:
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs, self._texts)
        found: list[Found] = [delta.text] if delta.text else []
        if self._tool_names:
            found = self._finders[index].push(delta.text)
        if not found:
            return [ChatPart(index, ChatDelta(content=""), logprobs)] if logprobs is not None else []
        first, *others = (ChatPart(index, _chat_delta(item)) for item in found)
        first.logprobs = logprobs
        return [first, *others]

    def _end(self, index: int, finished: inference_pb2.Finished) -> list[ChatPart]:
        reason = finish_reason(finished)
        finder = self._finders[index]
        found: list[Found] = [finished.text] if finished.text else []
        if self._tool_names:
            found = [*finder.push(finished.text), *finder.finish()]
            if finder.has_whole_calls and reason == "stop":
                reason = "tool_calls"
        parts = [ChatPart(index, _chat_delta(item)) for item in found]
        return [*parts, ChatPart(index, ChatDelta(), finish_reason=reason)]


class CompletionChoices:
    """Of one of the prompts of a request for completions."""

    def __init__(self, first_index: int, *, echo: bool, echo_text: str = "", prompt_only: bool = False) -> None:
        """`echo_text`: the prompt as the client wrote it; empty: it sent ids. `prompt_only`: no token is wanted."""
        self.meter = Meter()
        self._first_index = first_index
        self._wants_echo = echo
        self._echo_text = echo_text
        self._prompt_only = prompt_only
        self._echo: Echo | None = None
        self._texts: TokenTexts | None = None
        self._new_places: Callable[[], TokenPlaces] | None = None
        """Where an answer's tokens stand, anew for each choice; None where no log probabilities are told."""
        self._places: dict[int, TokenPlaces | None] = {}
        """Of the choices that have begun."""

    def begin(self, request: PreparedRequest, model: ServedModel) -> None:
        """See `Choices`."""
        sampling = request.message.sampling
        if self._wants_echo:
            self._echo = Echo(model.known_tokenizer, request.tokens, self._echo_text)
        if sampling.HasField("logprobs"):
            self._texts = token_texts(model.known_tokenizer)
            self._new_places = partial(
                TokenPlaces,
                model.known_tokenizer,
                first=len(self._echo.text) if self._echo is not None else 0,
                context=request.tokens[-CONTEXT_TOKENS:].tolist(),
                skip_special_tokens=not sampling.HasField("skip_special_tokens") or sampling.skip_special_tokens,
            )
            if self._echo is not None:
                self._echo.tell([None])

    def take(self, message: inference_pb2.GenerateResponse) -> list[CompletionPart]:
        """See `Choices`."""
        self.meter.take(message)
        kind = message.WhichOneof("event")
        if kind == "prompt_logprobs" and self._echo is not None and self._texts is not None:
            self._echo.tell(message.prompt_logprobs.tokens)
        if kind not in ("delta", "finished"):
            return []
        parts = []
        if message.index not in self._places:
            self._places[message.index] = None if self._new_places is None else self._new_places()
            if self._echo is not None:
                parts.append(self._part(message.index, self._echo.text, (), ()))
                parts[0].logprobs = joined_completion(self._echo.logprobs)
        if kind == "delta":
            delta = message.delta
            if not self._prompt_only and (delta.text or self._texts is not None):
                parts.append(self._part(message.index, delta.text, delta.token_ids, delta.logprobs))
            return parts
        reason = finish_reason(message.finished)
        text = message.finished.text
        if self._prompt_only:
            self.meter.completion_tokens, text, reason = 0, "", "length"
        end = self._part(message.index, text, (), ())
        end.finish_reason = reason
        return [*parts, end]

    def _part(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[inference_pb2.TokenLogprobs],
    ) -> CompletionPart:
        part = CompletionPart(self._first_index + index, text)
        places = self._places[index]
        if self._texts is not None and places is not None and token_ids:
            part.logprobs = completion_logprobs(token_ids, logprobs, self._texts, places)
        return part


def finish_reason(finished: inference_pb2.Finished) -> FinishReason:
    """OpenAI knows no answer that was broken off: that is a failure. Raises Unavailable."""
    reason = convert.finish_reason(finished.reason)
    if reason is Ending.ABORT:
        raise Unavailable("the request was aborted at its worker: the answer is not complete", retry_after_s=1.0)
    return "length" if reason is Ending.LENGTH else "stop"


def _chat_delta(found: Found) -> ChatDelta:
    return ChatDelta(content=found) if isinstance(found, str) else ChatDelta(tool_calls=[found])
