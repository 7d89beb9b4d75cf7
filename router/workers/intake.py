"""Takes in one state update of a worker: into its state, into the sketch, and on to who listens. Waits for nothing."""

from __future__ import annotations

from enum import Enum, auto
from functools import partial

import numpy as np
import structlog

from radixfleet import convert
from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.types import HashArray, Incarnation
from radixfleet.v1 import worker_pb2
from router.index.sketch import NO_BLOCKS
from router.workers.listener import LeasePhase
from router.workers.state import WorkerState
from router.workers.surroundings import Surroundings

_log = structlog.get_logger("radixfleet.router.workers")

_PHASES = {
    worker_pb2.LeaseEvent.PHASE_STARTED: LeasePhase.STARTED,
    worker_pb2.LeaseEvent.PHASE_FIRST_TOKEN: LeasePhase.FIRST_TOKEN,
    worker_pb2.LeaseEvent.PHASE_ENDED: LeasePhase.ENDED,
}


class Next(Enum):
    """What the connection has to do after an update."""

    READ = auto()
    """Nothing: read on."""
    ASK = auto()
    """The worker's status or engine has changed, so its facts may have, too: ask for them again."""
    RESYNC = auto()
    """A report is missing: ask again, and for a stream from the beginning."""


class StateIntake:
    """Takes in the state updates of one worker. Raises ValueError for an update that no worker sends."""

    def __init__(self, state: WorkerState, around: Surroundings) -> None:
        self._state = state
        self._sketch = around.sketch
        self._metrics = around.metrics
        self._listener = around.listener
        self._clock = around.clock
        self._capacity: worker_pb2.Capacity | None = None
        """As last told."""

    def take(self, update: worker_pb2.StateUpdate, *, tells_prefixes: bool = True) -> Next:
        """Take it in, and say what is to be done. `tells_prefixes`: its digests and deltas are the whole truth."""
        state = self._state
        now_s = self._clock.now()
        if state.connected and state.updated_at_s is not None:
            self._metrics.state_gap_s.observe(now_s - state.updated_at_s)
        state.updated_at_s = now_s
        is_new_engine = self._take_incarnation(Incarnation(update.incarnation))
        status = convert.worker_status(update.status)
        is_new_status = status is not state.status
        if is_new_status:
            _log.info("worker status", worker=state.name, status=status.value, was=state.status.value)
            state.status = status
        if update.HasField("capacity"):
            self._take_capacity(update.capacity)
        accepted = convert.accepted_load(update.accepted) if update.HasField("accepted") else None
        state.report(convert.load(update.load), accepted, is_between_reports=update.between_reports)
        if update.HasField("totals"):
            state.activity.heard(partial(convert.totals, update.totals))
        state.advice = tuple(update.advice)
        for event in update.lease_events:
            phase = _PHASES.get(event.phase)
            if phase is not None:
                self._listener.lease_event(state, event.lease_id, phase, event.cached_tokens)
        if not tells_prefixes:
            if not state.approximate:
                self._sketch.lose_truth(state.slot)
        elif not self._take_prefix(update):
            self._metrics.resyncs.inc()
            _log.warning("a cache report of the worker is missing, asking for all of it", worker=state.name)
            return Next.RESYNC
        return Next.ASK if is_new_engine or is_new_status else Next.READ

    def _take_incarnation(self, incarnation: Incarnation) -> bool:
        """True: the engine is another one than before."""
        state = self._state
        if incarnation == state.incarnation:
            return False
        is_restart = state.incarnation is not None
        state.incarnation = incarnation
        self._sketch.set_incarnation(state.slot, incarnation)
        if is_restart:
            _log.info("worker restarted, its cache is empty", worker=state.name)
            state.restarted()
            self._listener.worker_gone(state)
        return is_restart

    def _take_capacity(self, message: worker_pb2.Capacity) -> None:
        if message == self._capacity:  # which it nearly always is, and reading it takes ten times as long
            return
        self._capacity = worker_pb2.Capacity()
        self._capacity.CopyFrom(message)
        capacity = convert.capacity(message)
        if capacity != self._state.capacity:
            self._state.capacity = capacity
            self._sketch.set_capacity(self._state.slot, capacity.kv_tokens // BLOCK_TOKENS)

    def _take_prefix(self, update: worker_pb2.StateUpdate) -> bool:
        """False: the update does not follow the last one. Without comparable blocks there is nothing to follow."""
        state, sketch = self._state, self._sketch
        if state.facts is None or not state.facts.comparable_blocks:
            return True
        if update.WhichOneof("prefix") == "digest":
            digest = _hashes(update.digest.block_hashes)
            sketch.apply_digest(state.slot, update.incarnation, update.sequence, digest)
        elif update.between_reports:
            if not sketch.repeats(state.slot, update.incarnation, update.sequence):
                return False
        else:
            evicted, added = _hashes(update.delta.evicted), _hashes(update.delta.added)
            if not sketch.apply_delta(state.slot, update.incarnation, update.sequence, evicted, added):
                return False
        sketch.apply_coming(state.slot, _hashes(update.coming), _hashes(update.gone))
        return True


def _hashes(data: bytes) -> HashArray:
    """Raises ValueError when the length is no multiple of 8."""
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False) if data else NO_BLOCKS
