"""When an engine's events are the whole truth, and when they are not."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from structlog.testing import capture_logs

from router.dialects.kv_events import _MOST_FORGIVEN, KvEvents, _Resync


def batch(sequence: int, *events: Any, **fields: Any) -> Any:
    return pb.KvEventBatch(sequence_number=sequence, events=events, **fields)


def stored(name: int, parent: int | None = None, **fields: Any) -> Any:
    block = pb.KvBlock(block_hash=name, token_ids=[name % 7] * 64, block_size=64)
    return pb.KvCacheEvent(stored=pb.KvBlocksStored(blocks=[block], parent_block_hash=parent, **fields))


def snapshot(sequence: int, index: int, count: int, *events: Any, unknown: int = 0) -> Any:
    about = pb.KvSnapshotChunk(index=index, count=count, unknown_before=unknown)
    return batch(sequence, *events, snapshot=about)


CLEARED = pb.KvCacheEvent(cleared=pb.KvCacheCleared())


@pytest.fixture
def events() -> KvEvents:
    return KvEvents("engine", "model", lambda: None)


def test_the_publishers_first_batch_begins_the_truth(events: KvEvents) -> None:
    events.take(batch(0, stored(1)))
    assert (events.is_complete, events.generation, len(events.blocks)) == (True, 1, 1)
    events.take(batch(1, stored(-2, 1)))
    assert (events.generation, len(events.blocks)) == (1, 2)


def test_one_batch_before_the_first_is_no_fault_and_neither_is_what_goes_on_from_its_blocks(events: KvEvents) -> None:
    """Servers warm their engine up with prompts of their own, before anybody listens."""
    events.take(batch(1, stored(1)))
    events.take(batch(2, stored(3, 2)))  # behind a block of batch 0
    assert (events.is_complete, events.generation, len(events.blocks)) == (True, 1, 1)
    events.take(batch(3, CLEARED, stored(5)))
    with pytest.raises(_Resync):
        events.take(batch(4, stored(7, 6)))


def test_a_first_batch_from_which_many_blocks_go_on_is_missed_too_much(events: KvEvents) -> None:
    """Behaviour 50: where all prompts begin with what a warm-up left, or more was lost, nothing of it is the truth."""
    events.take(batch(1, stored(1)))
    for number in range(_MOST_FORGIVEN):
        events.take(batch(2 + number, stored(100 + number, 2)))
    with pytest.raises(_Resync) as caught:
        events.take(batch(2 + _MOST_FORGIVEN, stored(99, 2)))
    events._distrust(str(caught.value))  # as `follow` does
    events.take(batch(1, stored(1)))
    events.take(batch(2, stored(100, 2)))
    assert not events.is_complete, "told again from the second batch on, it is no better"
    events.take(batch(3, CLEARED, stored(5)))
    assert events.is_complete


def test_what_is_forgiven_is_told_once(events: KvEvents) -> None:
    events.take(batch(1, stored(1)))
    with capture_logs() as lines:
        events.take(batch(2, stored(3, 2)))
        events.take(batch(3, stored(4, 2)))
    assert [(line["log_level"], line["worker"]) for line in lines] == [("info", "engine")]


def test_a_stream_joined_late_is_not_the_truth_until_all_is_cleared(events: KvEvents) -> None:
    events.take(batch(40, stored(1)))
    assert not events.is_complete
    events.take(batch(41, stored(3, 2)))  # a parent from before: no fault
    events.take(batch(42, CLEARED, stored(5)))
    assert (events.is_complete, len(events.blocks)) == (True, 1)


def test_a_snapshot_is_the_truth_when_its_last_chunk_is_there(events: KvEvents) -> None:
    events.take(snapshot(8, 0, 2, CLEARED, stored(1)))
    events.take(snapshot(9, 1, 2, stored(2, 1)))
    assert (events.is_complete, len(events.blocks)) == (True, 2)
    events.take(batch(10, stored(3, 2)))
    assert len(events.blocks) == 3


def test_a_snapshot_that_lacks_something_is_not_the_truth(events: KvEvents) -> None:
    events.take(snapshot(9, 0, 1, CLEARED, stored(1), unknown=3))
    assert not events.is_complete


def test_a_later_snapshot_replaces_everything(events: KvEvents) -> None:
    events.take(batch(0, stored(1), stored(2)))
    events.take(snapshot(70, 0, 1, CLEARED, stored(3)))
    assert (events.is_complete, len(events.blocks)) == (True, 1)


def test_a_load_record_repeats_a_number_and_is_no_batch(events: KvEvents) -> None:
    events.take(batch(0, stored(1)))
    for _ in range(3):
        events.take(batch(0, load=pb.EngineLoad(running_requests=4, load_only=True)))
    events.take(batch(1, stored(2, 1)))
    assert (events.load.running_requests, len(events.blocks)) == (4, 2)


def test_a_load_record_before_the_first_batch_tells_nothing_of_the_cache(events: KvEvents) -> None:
    events.take(batch(0, load=pb.EngineLoad(load_only=True)))
    assert not events.is_complete
    events.take(batch(0, stored(1)))
    assert events.is_complete


@pytest.mark.parametrize("sequence", [0, 2, 9])
def test_a_number_out_of_turn_calls_for_all_of_it(events: KvEvents, sequence: int) -> None:
    """Behaviour 50."""
    events.take(batch(0, stored(1)))
    with pytest.raises(_Resync):
        events.take(batch(sequence, stored(2, 1)))


def test_a_parent_that_was_never_told_calls_for_all_of_it(events: KvEvents) -> None:
    events.take(batch(0, stored(1)))
    with pytest.raises(_Resync):
        events.take(batch(1, stored(3, 2)))


@pytest.mark.parametrize(
    "fields",
    [
        {"tier": pb.KV_CACHE_TIER_HOST},
        {"tier": pb.KV_CACHE_TIER_EXTERNAL},
        {"locality": pb.KV_CACHE_LOCALITY_REMOTE},
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"},
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window_mla"},
        {"group_idx": 1, "kv_cache_spec_kind": "mamba"},
    ],
)
def test_what_is_not_on_the_device_or_makes_no_prefixes_does_not_count(
    events: KvEvents, fields: dict[str, Any]
) -> None:
    events.take(batch(0, stored(1, tier=pb.KV_CACHE_TIER_DEVICE, group_idx=0, kv_cache_spec_kind="full_attention")))
    events.take(batch(1, stored(2, 1, **fields)))
    own = {name: value for name, value in fields.items() if name in ("tier", "locality", "group_idx")}
    events.take(batch(2, pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=[1], **own))))
    assert len(events.blocks) == 1


@pytest.mark.parametrize("kind", ["full_attention", "sink_full_attention", "mla_attention"])
def test_every_kind_of_whole_attention_makes_prefixes(events: KvEvents, kind: str) -> None:
    """Engines of DeepSeek's models were taken to cache nothing."""
    events.take(batch(0, stored(1, group_idx=0, kv_cache_spec_kind=kind)))
    assert len(events.blocks) == 1


def test_an_engine_with_a_sliding_window_alone_does_not_tell_what_it_has(events: KvEvents) -> None:
    """It was taken to cache nothing, whatever the router had sent there."""
    events.take(batch(0, stored(1, group_idx=0, kv_cache_spec_kind="sliding_window")))
    assert not events.is_complete
    was = events.generation
    events.take(batch(1, stored(2, group_idx=1, kv_cache_spec_kind="full_attention")))
    assert events.is_complete
    assert events.generation > was
    assert len(events.blocks) == 1


def test_a_truth_that_is_lost_after_a_first_warning_is_told(events: KvEvents) -> None:
    events.take(batch(0, stored(1, group_idx=0, kv_cache_spec_kind="sliding_window")))
    events.take(batch(1, stored(2, group_idx=1, kv_cache_spec_kind="full_attention")))
    with capture_logs() as logs:
        events._distrust("lost")
    assert [line["log_level"] for line in logs] == ["warning"]


def test_groups_of_one_batch_are_one_beginning(events: KvEvents) -> None:
    kinds = ["mamba", "mla_attention"]
    groups = [stored(1 + group, group_idx=group, kv_cache_spec_kind=kind) for group, kind in enumerate(kinds)]
    with capture_logs() as logs:
        events.take(batch(0, *groups))
    assert events.is_complete
    assert not [line for line in logs if line["log_level"] == "warning"]


def test_what_a_tier_behind_the_engine_drops_is_still_here(events: KvEvents) -> None:
    events.take(batch(0, stored(1)))
    events.take(batch(1, pb.KvCacheEvent(cleared=pb.KvCacheCleared(ownership="agent"))))
    assert len(events.blocks) == 1
    events.take(batch(2, pb.KvCacheEvent(cleared=pb.KvCacheCleared())))
    assert not len(events.blocks)


def test_salts_that_never_come_again_are_not_kept(events: KvEvents) -> None:
    """Behaviour 49: one that is made anew for each client's request is as good as endless."""
    for number in range(2000):
        events.take(batch(2 * number, stored(1, cache_salt=str(number))))
        events.take(batch(2 * number + 1, pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=[1]))))
        events.blocks.drain()
    assert not len(events.blocks)
    assert all(len(value) < 10 for value in vars(events).values() if isinstance(value, dict | set))
