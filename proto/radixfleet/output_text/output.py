"""A request's tokens as the text its client reads: detokenized, and cut before a stop string."""

from __future__ import annotations

from radixfleet.output_text.detokenizer import Detokenizer
from radixfleet.output_text.stop_strings import StopMatcher


class OutputText:
    """Detokenizer and stop matcher of one request.

    Tokens in `stop_token_ids` end the generation by themselves and, like a stop string, are not part of the text.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher | None, stop_token_ids: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_token_ids = stop_token_ids

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was found: the request is over, and no further token counts."""
        return self._stops.matched if self._stops is not None else None

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text to send, possibly empty."""
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
