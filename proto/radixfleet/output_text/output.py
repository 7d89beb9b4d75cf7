"""A request's tokens as the text its client reads: detokenized, and cut before a stop string."""

from __future__ import annotations

from collections.abc import Mapping

from radixfleet.output_text.detokenizer import Detokenizer
from radixfleet.output_text.stop_strings import StopMatcher


class OutputText:
    """Detokenizer and stop matcher of one request.

    Tokens in `stop_token_ids` end the generation by themselves and, like a stop string, are not part of the text.
    `unseen_stops`: stop strings that are tokens which the text leaves out, by token.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher | None,
        stop_token_ids: frozenset[int],
        unseen_stops: Mapping[int, str] | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._unseen_stops = unseen_stops or {}
        self._unseen_match: str | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was found: the request is over, and no further token counts."""
        found = self._stops.matched if self._stops is not None else None
        return found if found is not None else self._unseen_match

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text to send, possibly empty."""
        if token_id in self._unseen_stops:
            text = self.finish()
            self._unseen_match = self._unseen_stops[token_id]
            return text
        if token_id in self._stop_token_ids:
            return ""
        text = self._detokenizer.push(token_id)
        return self._stops.push(text) if self._stops is not None else text

    def finish(self) -> str:
        """The text still to send when no token follows."""
        if self.matched_stop is not None:
            return ""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        text = self._stops.push(text)
        return text if self._stops.matched is not None else text + self._stops.finish()
