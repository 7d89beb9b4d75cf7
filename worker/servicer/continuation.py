"""Going on with an answer whose beginning another worker has given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from radixfleet.output_text.output import OutputText
from radixfleet.types import FinishReason
from worker.core.messages import Ended
from worker.engine.handle import RequestStream


class Ending(NamedTuple):
    """Why an answer is over where another worker left it."""

    reason: FinishReason
    matched_token_id: int | None = None


def replay(
    generated: Sequence[int], text: OutputText, stop_token_ids: Collection[int], *, min_new_tokens: int, most: int
) -> Ending | None:
    """Bring `text` to where the client's own ends, saying nothing; the end of the answer, when that is it.

    Text depends on the tokens alone, so what is held back here is what the other worker held back. Some 10 us a token:
    not for the event loop. `most`: tokens that the whole answer may have.
    """
    for count, token_id in enumerate(generated, start=1):
        text.push(token_id)
        if text.matched_stop is not None:
            return Ending(FinishReason.STOP)
        if token_id in stop_token_ids and count > min_new_tokens:
            return Ending(FinishReason.STOP, token_id)
    return Ending(FinishReason.LENGTH) if len(generated) >= most else None


def ended_stream(uid: int, ending: Ending) -> RequestStream:
    """The stream of a request that the engine need not see."""
    stream = RequestStream(uid, abandon=lambda _: None)
    stream.feed(Ended(uid, ending.reason, ending.matched_token_id))
    return stream
