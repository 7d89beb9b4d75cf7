"""Going on with an answer whose beginning another worker has given."""

from __future__ import annotations

from radixfleet.output_text.output import OutputText
from radixfleet.types import FinishReason
from worker.core.messages import Ended
from worker.engine.handle import RequestStream
from worker.servicer.intake import Prepared


def replay(prepared: Prepared, text: OutputText, uid: int) -> Ended | None:
    """Bring `text` to where the client's own ends, saying nothing; the end of the answer, when that is it.

    Text depends on the tokens alone, so what is held back here is what the other worker held back.
    """
    generated = prepared.generated.tolist()
    for count, token_id in enumerate(generated, start=1):
        text.push(token_id)
        if text.matched_stop is not None:
            return Ended(uid, FinishReason.STOP)
        if token_id in prepared.stop_token_ids and count > prepared.sampling.min_new_tokens:
            return Ended(uid, FinishReason.STOP, matched_token_id=token_id)
    return Ended(uid, FinishReason.LENGTH) if len(generated) >= prepared.max_new_tokens else None


def ended_stream(ended: Ended) -> RequestStream:
    """The stream of a request that the engine need not see."""
    stream = RequestStream(ended.uid, abandon=lambda _: None)
    stream.feed(ended)
    return stream
