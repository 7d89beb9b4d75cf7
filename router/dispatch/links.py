"""The way of requests to each worker: a stream, a call for each, or a translation for engines of another dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from router.dialects.speaker import Generator
from router.dispatch.link import CallLink, WorkerLink, broken
from router.dispatch.link_stream import StreamLink
from router.dispatch.link_translated import TranslatedLink
from router.workers.state import WorkerState


class Links:
    """The way to each worker: kept while the worker is known."""

    def __init__(
        self,
        channel: Callable[[WorkerState], grpc.aio.Channel],
        generator: Callable[[WorkerState], Generator | None],
        *,
        streams: bool,
    ) -> None:
        """`generator`: for workers that speak another dialect. `streams`: one stream a worker of ours, where it speaks
        that, else a call for each request.
        """
        self._channel = channel
        self._generator = generator
        self._streams = streams
        self._links: dict[WorkerState, StreamLink | CallLink] = {}

    def to(self, worker: WorkerState) -> WorkerLink:
        """The link to a worker. Raises LinkFailure for one that was removed after it had been chosen."""
        if worker.removed:
            raise broken(worker.name, "it was removed")
        generator = self._generator(worker)
        if generator is not None:
            return TranslatedLink(generator, worker.name)
        link = self._links.get(worker)
        if link is None:
            self._links = {known: link for known, link in self._links.items() if not known.removed}
            channel = self._channel(worker)
            link = StreamLink(channel, worker) if self._streams else CallLink(channel, worker.name)
            self._links[worker] = link
            worker.on_silence = link.cut
        return link

    async def close(self) -> None:
        """End all streams."""
        await asyncio.gather(*(link.close() for link in self._links.values() if isinstance(link, StreamLink)))
