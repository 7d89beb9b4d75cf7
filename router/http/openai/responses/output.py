"""From the pieces of a chat to the items of a response, and the events that tell of them.

    text      output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
              output_item.done
    a call    output_item.added, function_call_arguments.delta, function_call_arguments.done, output_item.done

Text before, between and behind calls makes a message each. An answer without any is one empty message. Log
probabilities are those of the text: tokens that make none are told with the next text, and left out before a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.http.openai.responses.shapes import (
    ContentPartAdded,
    ContentPartDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    ItemEvent,
    ItemStatus,
    OutputFunctionCall,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
)
from router.http.openai.shapes import ChatPart, TokenLogprob, ToolCall


@dataclass(slots=True)
class _Open:
    """The message that text goes to."""

    id: str
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def text(self) -> OutputText:
        return OutputText("".join(self.texts), self.logprobs)

    def message(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[self.text()])


class ResponseOutput:
    """The output of one response."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._done: list[OutputItem] = []
        self._open: _Open | None = None
        self._held: list[TokenLogprob] = []
        """Of tokens since the last text."""
        self.is_cut = False
        """The limit ended it."""

    def items(self) -> list[OutputItem]:
        """What there is so far; a message that has not ended is not complete."""
        return [*self._done, self._open.message("incomplete")] if self._open else [*self._done]

    def add(self, part: ChatPart) -> list[ItemEvent]:
        """What the next piece brings."""
        events: list[ItemEvent] = []
        logprobs = part.logprobs.content if part.logprobs else []
        if isinstance(part.delta.tool_calls, list):
            self._held = []
            events += self._close("completed")
            events += [event for call in part.delta.tool_calls for event in self._call(call)]
        elif part.delta.content:
            events += [*self._opened(), self._text(part.delta.content, logprobs)]
        else:
            self._held += logprobs
        if part.finish_reason is not None:
            self.is_cut = part.finish_reason == "length"
            events += self._finish()
        return events

    def _finish(self) -> Sequence[ItemEvent]:
        events: list[ItemEvent] = [] if self._done else [*self._opened()]
        if self._open and self._held:
            events.append(self._text("", []))
        return [*events, *self._close("incomplete" if self.is_cut else "completed")]

    def _opened(self) -> Sequence[ItemEvent]:
        """There is a message that text can go to."""
        if self._open is not None:
            return ()
        index = len(self._done)
        self._open = _Open(f"msg_{self._request_id}_{index}", index)
        empty = OutputMessage(id=self._open.id, status="in_progress", content=[])
        return (
            OutputItemAdded(output_index=index, item=empty),
            ContentPartAdded(item_id=self._open.id, output_index=index, part=OutputText("")),
        )

    def _text(self, text: str, logprobs: Sequence[TokenLogprob]) -> OutputTextDelta:
        assert self._open is not None, "see _opened"
        told = [*self._held, *logprobs]
        self._held = []
        self._open.texts.append(text)
        self._open.logprobs += told
        return OutputTextDelta(item_id=self._open.id, output_index=self._open.index, delta=text, logprobs=told)

    def _close(self, status: ItemStatus) -> Sequence[ItemEvent]:
        if self._open is None:
            return ()
        message, index = self._open.message(status), self._open.index
        (part,) = message.content
        self._open = None
        self._done.append(message)
        return (
            OutputTextDone(item_id=message.id, output_index=index, text=part.text, logprobs=part.logprobs),
            ContentPartDone(item_id=message.id, output_index=index, part=part),
            OutputItemDone(output_index=index, item=message),
        )

    def _call(self, call: ToolCall) -> Sequence[ItemEvent]:
        index = len(self._done)
        name, arguments = call.function.name, call.function.arguments

        def item(status: ItemStatus, arguments: str) -> OutputFunctionCall:
            return OutputFunctionCall(id=item_id, status=status, call_id=call.id, name=name, arguments=arguments)

        item_id = f"fc_{self._request_id}_{index}"
        whole = item("completed", arguments)
        self._done.append(whole)
        return (
            OutputItemAdded(output_index=index, item=item("in_progress", "")),
            FunctionCallArgumentsDelta(item_id=item_id, output_index=index, delta=arguments),
            FunctionCallArgumentsDone(item_id=item_id, output_index=index, name=name, arguments=arguments),
            OutputItemDone(output_index=index, item=whole),
        )
