from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest

from router.workers.silence import limited_silence


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line


async def piped() -> tuple[AsyncIterator[bytes], int]:
    """A stream, and the descriptor that writes to it."""
    read, write = os.pipe()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", 0)
    )
    return lines(reader), write


async def test_a_silent_stream_times_out() -> None:
    stream, write = await piped()
    os.write(write, b"word\n")
    heard = []

    async def follow() -> None:
        async with limited_silence(0.05) as silence:
            while True:
                heard.append(await silence.next(stream))

    with pytest.raises(TimeoutError):
        await follow()
    assert heard == [b"word\n"]
    os.close(write)


async def test_what_came_while_this_process_did_not_run_is_heard() -> None:
    """Also of a router that was stopped for longer than workers may be silent."""
    stream, write = await piped()
    async with limited_silence(0.4) as silence:
        waiting = asyncio.ensure_future(silence.next(stream))
        await asyncio.sleep(0)
        for _ in range(2):
            os.write(write, b"word\n")
            time.sleep(0.5)  # noqa: ASYNC251 - nothing runs here meanwhile, which is what is tested
            assert await waiting == b"word\n"
            waiting = asyncio.ensure_future(silence.next(stream))
        os.close(write)
        assert await waiting is None


async def test_only_waiting_counts_as_silence() -> None:
    stream, write = await piped()
    async with limited_silence(0.02) as silence:
        await asyncio.sleep(0.1)
        os.write(write, b"word\n")
        assert await silence.next(stream) == b"word\n"
    os.close(write)
