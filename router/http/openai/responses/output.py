"""From the pieces of a chat to the items of a response, and the events that tell of them.

    text      output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
              output_item.done
    a call    output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done

Text before, between and behind calls makes a message each. An answer without any is one empty message. A call whose
arguments broke off is incomplete. An item is done when the next begins, or the answer has ended. Log
probabilities are those of the text: tokens that make none are told with the next text, and left out before a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from router.http.openai.json_object import is_object
from router.http.openai.responses.shapes import (
    NO_LOGPROBS,
    ContentPartAdded,
    ContentPartDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    ItemEvent,
    ItemStatus,
    Logprobs,
    OutputFunctionCall,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
)
from router.http.openai.shapes import ChatPart, ToolCallDelta


@dataclass(slots=True)
class _OpenMessage:
    """The message that text goes to."""

    id: str
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """Encoded; see `_listed`."""

    def item(self, status: ItemStatus) -> OutputMessage:
        text = OutputText("".join(self.texts), _listed(self.logprobs))
        return OutputMessage(id=self.id, status=status, content=[text])

    def closed(self, status: ItemStatus) -> tuple[OutputItem, Sequence[ItemEvent]]:
        message = self.item(status)
        text = message.content[0].text
        return message, (
            OutputTextDone(item_id=self.id, output_index=self.index, text=text),
            ContentPartDone(item_id=self.id, output_index=self.index, part=OutputText(text)),
            OutputItemDone(output_index=self.index, item=message),
        )


@dataclass(slots=True)
class _OpenCall:
    """The call that arguments go to."""

    id: str
    index: int
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus) -> OutputFunctionCall:
        arguments = "".join(self.arguments)
        return OutputFunctionCall(id=self.id, status=status, call_id=self.call_id, name=self.name, arguments=arguments)

    def closed(self, _: ItemStatus) -> tuple[OutputItem, Sequence[ItemEvent]]:
        """Its own status: the limit may cut behind it, and text may follow one that broke off."""
        call = self.item("completed" if is_object("".join(self.arguments)) else "incomplete")
        told = call.arguments
        return call, (
            FunctionCallArgumentsDone(item_id=self.id, output_index=self.index, name=self.name, arguments=told),
            OutputItemDone(output_index=self.index, item=call),
        )


class ResponseOutput:
    """The output of one response."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._done: list[OutputItem] = []
        self._open: _OpenMessage | _OpenCall | None = None
        self._held: list[bytes] = []
        """Log probabilities of tokens since the last text, encoded."""
        self.is_cut = False
        """The limit ended it."""

    def items(self) -> list[OutputItem]:
        """What there is so far; what has not ended is not complete."""
        return [*self._done, self._open.item("incomplete")] if self._open else [*self._done]

    def add(self, part: ChatPart) -> list[ItemEvent]:
        """What the next piece brings."""
        events: list[ItemEvent] = []
        logprobs = [msgspec.json.encode(part.logprobs.content)[1:-1]] if part.logprobs else []
        if isinstance(part.delta.tool_calls, list):
            self._held = []
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
        events: list[ItemEvent] = [] if self._done or self._open else [*self._opened()]
        if isinstance(self._open, _OpenMessage) and self._held:
            events.append(self._text("", []))
        return [*events, *self._close("incomplete" if self.is_cut else "completed")]

    def _opened(self) -> Sequence[ItemEvent]:
        """There is a message that text can go to."""
        if isinstance(self._open, _OpenMessage):
            return ()
        closed = self._close("completed")
        index = len(self._done)
        self._open = _OpenMessage(f"msg_{self._request_id}_{index}", index)
        empty = OutputMessage(id=self._open.id, status="in_progress", content=[])
        return (
            *closed,
            OutputItemAdded(output_index=index, item=empty),
            ContentPartAdded(item_id=self._open.id, output_index=index, part=OutputText("")),
        )

    def _text(self, text: str, logprobs: Sequence[bytes]) -> OutputTextDelta:
        assert isinstance(self._open, _OpenMessage), "see _opened"
        told = [*self._held, *logprobs]
        self._held = []
        self._open.texts.append(text)
        self._open.logprobs += told
        listed = _listed(told)
        return OutputTextDelta(item_id=self._open.id, output_index=self._open.index, delta=text, logprobs=listed)

    def _call(self, delta: ToolCallDelta) -> Sequence[ItemEvent]:
        name, arguments = delta.function.name, delta.function.arguments
        begun = self._begun(delta.id, name) if isinstance(delta.id, str) and isinstance(name, str) else ()
        assert isinstance(self._open, _OpenCall), "its first piece has its id and its name"
        self._open.arguments.append(arguments)
        return (
            *begun,
            FunctionCallArgumentsDelta(item_id=self._open.id, output_index=self._open.index, delta=arguments),
        )

    def _begun(self, call_id: str, name: str) -> Sequence[ItemEvent]:
        """A call."""
        closed = self._close("completed")
        index = len(self._done)
        self._open = _OpenCall(f"fc_{self._request_id}_{index}", index, call_id, name)
        return (*closed, OutputItemAdded(output_index=index, item=self._open.item("in_progress")))

    def _close(self, status: ItemStatus) -> Sequence[ItemEvent]:
        """The item that is open has ended. `status`: of a message; a call tells its own."""
        if self._open is None:
            return ()
        item, events = self._open.closed(status)
        self._open = None
        self._done.append(item)
        return events


def _listed(encoded: Sequence[bytes]) -> Logprobs:
    """Each is what stands between the brackets of a list."""
    return msgspec.Raw(b"[%b]" % b",".join(encoded)) if encoded else NO_LOGPROBS
