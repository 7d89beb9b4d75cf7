"""Frames arrive whole and in order, nothing blocks, and a peer that is gone is seen."""

from __future__ import annotations

import socket
import threading

import pytest

from worker.engine.wire import FrameSocket, PeerClosed


@pytest.fixture
def ends():
    left, plain = FrameSocket.pair()
    right = FrameSocket(plain)
    yield left, right
    left.close()
    right.close()


def exchange(sender: FrameSocket, receiver: FrameSocket, num_frames: int) -> list[bytes]:
    """Alternate flush and receive until `num_frames` have come."""
    frames: list[bytes] = []
    while len(frames) < num_frames:
        sender.flush()
        frames += receiver.receive()
    return frames


def test_frames_of_any_size_arrive_whole_and_in_order(ends) -> None:
    left, right = ends
    sent = [b"", b"a", b"b" * 65_536, b"", b"c" * (1 << 18), b"d" * 3]
    for payload in sent:
        left.send(payload)
    assert exchange(left, right, len(sent)) == sent
    assert not left.wants_write


def test_nothing_to_receive_is_an_empty_list(ends) -> None:
    assert ends[1].receive() == []


def test_a_peer_that_does_not_read_never_blocks_the_sender(ends) -> None:
    left, right = ends
    payload = bytes(1 << 20)
    for _ in range(32):
        left.send(payload)
    assert left.wants_write
    assert exchange(left, right, 32) == [payload] * 32


def test_a_frame_cut_anywhere_is_put_together(ends) -> None:
    left, plain = FrameSocket.pair()
    data = b"\x05\x00\x00\x00hello\x02\x00\x00\x00ok"
    frames = []
    for byte in data:
        plain.send(bytes([byte]))
        frames += left.receive()
    assert frames == [b"hello", b"ok"]
    left.close()
    plain.close()


def test_what_was_sent_before_the_end_is_received_before_the_end_is_told(ends) -> None:
    left, right = ends
    left.send(b"last words")
    left.close()
    assert right.receive() == [b"last words"]
    with pytest.raises(PeerClosed):
        right.receive()
    with pytest.raises(PeerClosed):
        right.receive()


def test_sending_to_a_peer_that_is_gone_raises_nothing_and_receive_tells(ends) -> None:
    left, right = ends
    right.close()
    left.send(b"x" * 100)
    left.send(b"y")
    assert not left.wants_write
    with pytest.raises(PeerClosed):
        left.receive()


def test_drain_sends_all_to_a_peer_that_reads_later(ends) -> None:
    left, right = ends
    left.send(bytes(1 << 24))
    draining = threading.Thread(target=left.drain)
    draining.start()
    frames: list[bytes] = []
    while not frames:
        right.wait_readable()
        frames = right.receive()
    draining.join()
    assert len(frames[0]) == 1 << 24


def test_a_peers_end_is_inherited_only_when_asked() -> None:
    left, plain = FrameSocket.pair()
    assert not plain.get_inheritable()
    assert plain.family == socket.AF_UNIX
    left.close()
    plain.close()
