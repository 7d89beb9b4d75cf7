"""What came of a step, request by request: KV that is there, tokens, and what they mean for their requests.

Most of what settles are decodes of requests that go on, 256 and more a step, of which nothing but a token is told. They
are booked at once (`_settle_decodes`): a quarter of a microsecond each, where the general way takes several.

Used by the scheduler alone.
"""

from __future__ import annotations

from itertools import compress

import numpy as np

from radixfleet.types import FinishReason
from worker.core.messages import Output, PromptChunk, PromptLogprobs
from worker.core.step import StepResult
from worker.memory.advisor import Advice
from worker.scheduling.assembly import Decodes, Launched, Piece
from worker.scheduling.counters import Counters
from worker.scheduling.holdings import Holdings
from worker.scheduling.lifecycle import Lifecycle
from worker.scheduling.notes import NOTHING, Note, PromptRun, notes_of
from worker.scheduling.recovery import take_back
from worker.scheduling.request import Request, State


class Settling:
    """See the head of the module."""

    def __init__(self, holdings: Holdings, lifecycle: Lifecycle, counters: Counters) -> None:
        self._holdings = holdings
        self._rows = holdings.rows
        self._lifecycle = lifecycle
        self._counters = counters

    def settle(self, launched: Launched, result: StepResult, given_up: Advice | None) -> None:
        """Book the result of a step. `given_up`: its one request does not run even alone."""
        notes = notes_of(result, launched)
        if result.error is not None:
            for sequence, piece in enumerate(launched.pieces):
                note = notes.get(sequence, NOTHING)
                self._fail(piece, note, given_up, ran_out=result.out_of_memory is not None)
            return
        self._settle_decodes(launched.decodes, result, notes)
        self._settle_chunks(launched, result, notes)

    def _settle_decodes(self, decodes: Decodes, result: StepResult, notes: dict[int, Note]) -> None:
        """Settle the step's decodes.

        Most go on and have no note but their token: what these have in common is settled in whole columns of `Rows`,
        and then each gets its token. The others (failed, stale, or with a note) are settled one by one.
        """
        rows, requests, starts = decodes.rows, decodes.requests, decodes.starts
        token_ids, failed = result.token_ids[: len(rows)].tolist(), result.failed[: len(rows)]
        goes_on = (self._rows.is_decoding[rows] > 0) & (self._rows.stale_steps[rows] == 0) & ~failed
        goes_on[[sequence for sequence in notes if sequence < len(rows)]] = False
        if np.count_nonzero(goes_on) < len(rows):
            for index in np.flatnonzero(~goes_on).tolist():
                note = notes.get(index, NOTHING)
                self._settle(decodes.piece(index), token_ids[index], note, has_failed=bool(failed[index]))
            rows, starts = rows[goes_on], starts[goes_on]
            requests, token_ids = list(compress(requests, goes_on)), list(compress(token_ids, goes_on))
        self._rows.computed(rows, starts)
        self._counters.generated_tokens += len(requests)
        ending = np.flatnonzero(self._rows.to_sample[rows] + self._rows.samples_in_flight[rows] == 0).tolist()
        for request, token_id in zip(requests, token_ids, strict=True):
            request.outputs.append(token_id)
        self._lifecycle.outbox.outputs.extend(map(Output, self._rows.uid[rows].tolist(), token_ids))
        stop_tokens = self._lifecycle.running.stop_tokens.intersection(token_ids)
        if stop_tokens:
            for request, token_id in zip(requests, token_ids, strict=True):
                if token_id in stop_tokens and self._stops_at(request, token_id):
                    self._lifecycle.finish(request, FinishReason.STOP, token_id)
        for index in ending:
            if requests[index].state is not State.FINISHED:
                self._lifecycle.finish(requests[index], FinishReason.LENGTH)

    @staticmethod
    def _stops_at(request: Request, token_id: int) -> bool:
        """Whether its last token, which is this one, ends it."""
        submit = request.submit
        return token_id in submit.stop_token_ids and len(request.outputs) > submit.min_new_tokens

    def _settle_chunks(self, launched: Launched, result: StepResult, notes: dict[int, Note]) -> None:
        """Settle the step's chunks, one by one."""
        for sequence, piece in enumerate(launched.chunks, start=len(launched.decodes.rows)):
            has_failed = bool(result.failed[sequence])
            if piece.request.submit.traced and not has_failed:
                self._tell_chunk(piece, result)
            note = notes.get(sequence, NOTHING)
            self._settle(piece, int(result.token_ids[sequence]), note, has_failed=has_failed)

    def _arrived(self, piece: Piece, *, sampled: bool) -> None:
        """Count a step with the piece as settled. Where it sampled nothing that counts, the token is still to come."""
        request = piece.request
        request.in_flight -= 1
        if piece.samples:
            request.samples_in_flight -= 1
            request.to_sample += not sampled

    def _settle(self, piece: Piece, token_id: int, note: Note, *, has_failed: bool) -> None:
        request = piece.request
        self._arrived(piece, sampled=not has_failed and not request.stale_steps and request.state is not State.FINISHED)
        request.tries_alone = 0
        if request.stale_steps:
            request.stale_steps -= 1
        elif has_failed:
            self._lifecycle.fail_step_of(request, note.cause, is_alone=True)
        else:
            self._book(piece, token_id, note)
        self._lifecycle.settled(request)

    def _fail(self, piece: Piece, note: Note, given_up: Advice | None, *, ran_out: bool) -> None:
        """Settle a piece of a step that failed as a whole; where memory ran out, the piece is taken back."""
        request = piece.request
        self._arrived(piece, sampled=False)
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
        """Book a piece that was computed: its KV, and its token if the request still wants it."""
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
        """Give the request one more token, which may end it. A stop token at the length limit ends it as a stop."""
        submit = request.submit
        request.outputs.append(token_id)
        self._counters.generated_tokens += 1
        self._lifecycle.outbox.outputs.append(Output(request.uid, token_id, note.sampled))
        if self._stops_at(request, token_id):
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
