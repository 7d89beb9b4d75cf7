"""What came of a step, request by request: KV that is there, tokens, and what they mean for their requests.

Most of what settles are decodes of requests that go on, 256 and more a step, of which nothing but a token is told. They
take a loop of their own (`_settle_decodes`): half a microsecond each, where the general way takes several.

Used by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from radixfleet.types import FinishReason
from worker.core.messages import Output, PromptChunk, PromptLogprobs
from worker.core.step import StepResult
from worker.memory.advisor import Advice
from worker.scheduling.assembly import Launched, Piece
from worker.scheduling.counters import Counters
from worker.scheduling.holdings import Holdings
from worker.scheduling.lifecycle import Lifecycle
from worker.scheduling.notes import Note, PromptRun, notes_of
from worker.scheduling.recovery import take_back
from worker.scheduling.request import Request, State


class Settling:
    """See the head of the module."""

    def __init__(self, holdings: Holdings, lifecycle: Lifecycle, counters: Counters) -> None:
        self._holdings = holdings
        self._lifecycle = lifecycle
        self._counters = counters

    def settle(self, launched: Launched, result: StepResult, given_up: Advice | None) -> None:
        """Book the result of a step. `given_up`: its one request does not run even alone."""
        pieces, token_ids = launched.pieces, result.token_ids.tolist()
        if result.error is not None:
            ran_out = result.out_of_memory is not None
            notes = notes_of(result, pieces)
            for piece, note in zip(pieces, notes, strict=True):
                self._fail(piece, note, given_up, ran_out=ran_out)
            return
        first = 0
        if result.logprobs is None and not result.ended and not result.causes and not result.failed.any():
            first = launched.num_decodes
            self._settle_decodes(pieces, token_ids, first)
        failed, notes = result.failed.tolist(), notes_of(result, pieces)
        for index in range(first, len(pieces)):
            if pieces[index].request.submit.traced and not failed[index]:
                self._tell_chunk(pieces[index], result)
            self._settle(pieces[index], token_ids[index], notes[index], has_failed=failed[index])

    def _settle_decodes(self, pieces: Sequence[Piece], token_ids: Sequence[int], num_decodes: int) -> None:
        """The first `num_decodes` pieces."""
        told = self._lifecycle.outbox.outputs.append
        decode, num_tokens = State.DECODE, 0
        for piece, token_id in zip(islice(pieces, num_decodes), token_ids, strict=False):
            request = piece.request
            if request.state is not decode or request.stale_steps:
                self._settle(piece, token_id, Note(), has_failed=False)
                continue
            request.in_flight -= 1
            request.samples_in_flight -= 1
            request.tries_alone = 0
            request.settled = piece.start + 1
            submit, outputs = request.submit, request.outputs
            outputs.append(token_id)
            told(Output(submit.uid, token_id))
            num_tokens += 1
            if token_id in submit.stop_token_ids and len(outputs) > submit.min_new_tokens:
                self._lifecycle.finish(request, FinishReason.STOP, token_id)
            elif len(outputs) >= submit.max_new_tokens:
                self._lifecycle.finish(request, FinishReason.LENGTH)
        self._counters.generated_tokens += num_tokens

    def _settle(self, piece: Piece, token_id: int, note: Note, *, has_failed: bool) -> None:
        request = piece.request
        request.in_flight -= 1
        request.samples_in_flight -= piece.samples
        request.tries_alone = 0
        if request.stale_steps:
            request.stale_steps -= 1
        elif has_failed:
            self._lifecycle.fail_step_of(request, note.cause, is_alone=True)
        else:
            self._book(piece, token_id, note)
        self._lifecycle.settled(request)

    def _fail(self, piece: Piece, note: Note, given_up: Advice | None, *, ran_out: bool) -> None:
        """The step failed as a whole: where it ran out of memory it is taken back."""
        request = piece.request
        request.in_flight -= 1
        request.samples_in_flight -= piece.samples
        if not ran_out:
            request.tries_alone = 0
        if request.stale_steps:
            request.stale_steps -= 1
        elif ran_out:
            take_back(request)
            if given_up is not None and request.state is not State.FINISHED:
                self._lifecycle.give_up(request, given_up)
        else:
            self._lifecycle.fail_step_of(request, note.cause, is_alone=False)
        self._lifecycle.settled(request)

    def _book(self, piece: Piece, token_id: int, note: Note) -> None:
        """The piece was computed: its KV is there, and its token, if its request still wants it."""
        request = piece.request
        request.settled = piece.start + piece.length
        if request.state is State.FINISHED:
            self._counters.discarded_tokens += piece.samples
            return
        if piece.start < len(request.fill_ids):
            self._holdings.keep(request.held, request.fill_ids[: request.settled])
        if note.prompt is not None:
            self._tell_prompt(request, note.prompt)
        if piece.samples:
            self._accept(request, token_id, note)

    def _accept(self, request: Request, token_id: int, note: Note) -> None:
        """One token more, and what it means for its request. A stop token at the length limit is a stop."""
        submit = request.submit
        request.outputs.append(token_id)
        self._counters.generated_tokens += 1
        self._lifecycle.outbox.outputs.append(Output(request.uid, token_id, note.sampled))
        if token_id in submit.stop_token_ids and len(request.outputs) > submit.min_new_tokens:
            self._lifecycle.finish(request, FinishReason.STOP, token_id)
        elif note.has_ended:
            self._lifecycle.finish(request, FinishReason.STOP)
        elif len(request.outputs) >= submit.max_new_tokens:
            self._lifecycle.finish(request, FinishReason.LENGTH)

    def _tell_chunk(self, piece: Piece, result: StepResult) -> None:
        """A part of a traced prompt was computed."""
        request = piece.request
        if piece.start < len(request.fill_ids) and request.state is not State.FINISHED and not request.stale_steps:
            chunk = PromptChunk(request.uid, piece.start, piece.length, result.started_s, result.ended_s)
            self._lifecycle.outbox.chunks.append(chunk)

    def _tell_prompt(self, request: Request, run: PromptRun) -> None:
        """Log probabilities of the prompt came. After a retraction, some may have been told already."""
        known, k = request.next_prompt_logprob - run.start, request.submit.prompt_logprobs or 0
        if not request.next_prompt_logprob or known >= len(run.logprobs):
            return
        top_ids, top_logprobs = run.top_ids[known:, :k].reshape(-1), run.top_logprobs[known:, :k].reshape(-1)
        told = PromptLogprobs(request.uid, request.next_prompt_logprob, run.logprobs[known:], top_ids, top_logprobs)
        self._lifecycle.outbox.prompt_logprobs.append(told)
        request.next_prompt_logprob = run.start + len(run.logprobs)
        if request.next_prompt_logprob == len(request.submit.token_ids):
            request.next_prompt_logprob = 0
