"""Stop strings over streamed text: finds the first one to be complete, and holds back only what could still begin one.

An Aho-Corasick automaton reads the text character by character. Its state is the longest suffix of the text so far that
begins some stop string: exactly what has to be held back, and it is the same however the text was cut into pieces.
Reading costs the same for each character, whatever the stop strings are.

Of several stop strings, the one whose last character comes first wins; of those that end together, the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_ROOT = 0


class StopStrings:
    """The automaton of a set of stop strings. Immutable; costs time and memory in proportion to their length."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._children: list[dict[str, int]] = [{}]
        self._failure: list[int] = [_ROOT]
        self._depth: list[int] = [0]
        self._match: list[str | None] = [None]
        """For each state, the longest stop string that ends there."""
        self._first = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after `character`."""
        while character not in self._children[state]:
            if state == _ROOT:
                return _ROOT
            state = self._failure[state]
        return self._children[state][character]

    def none_begins_in(self, text: str) -> bool:
        """Whether `text`, read at the beginning, leaves the state there: most text does, and is not read by step."""
        return self._first.isdisjoint(text)

    def depth(self, state: int) -> int:
        """Characters at the end of the text that could begin a stop string."""
        return self._depth[state]

    def match(self, state: int) -> str | None:
        """The stop string that is complete in this state."""
        return self._match[state]

    def _add(self, stop: str) -> None:
        state = _ROOT
        for character in stop:
            following = self._children[state].get(character)
            if following is None:
                following = len(self._children)
                self._children[state][character] = following
                self._children.append({})
                self._failure.append(_ROOT)
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        """Set the failure links breadth first, so that a state's link is ready before its children's."""
        queue = deque(self._children[_ROOT].values())
        while queue:
            state = queue.popleft()
            for character, child in self._children[state].items():
                self._failure[child] = self.step(self._failure[state], character)
                if self._match[child] is None:
                    self._match[child] = self._match[self._failure[child]]
                queue.append(child)


class StopMatcher:
    """One request's place in its text."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = _ROOT
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found. Text after it is dropped."""

    def push(self, text: str) -> str:
        """Take the next text; returns what can go to the client. After a match nothing more comes out."""
        if self.matched is not None:
            return ""
        if self._state == _ROOT and self._stops.none_begins_in(text):
            return text
        step, match = self._stops.step, self._stops.match
        for index, character in enumerate(text):
            self._state = step(self._state, character)
            self.matched = match(self._state)
            if self.matched is not None:
                read = self._held + text[: index + 1]
                self._held = ""
                return read[: len(read) - len(self.matched)]
        read = self._held + text
        keep = len(read) - self._stops.depth(self._state)
        self._held = read[keep:]
        return read[:keep]

    def finish(self) -> str:
        """The text still held back: no more comes, so it begins no stop string."""
        held, self._held = self._held, ""
        return held
