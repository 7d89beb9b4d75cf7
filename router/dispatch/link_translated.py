"""Requests to an engine that speaks another dialect: the third `WorkerLink`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc.aio

from radixfleet.cancellation import is_cancelled
from radixfleet.errors import RadixfleetError
from router.dialects.speaker import Faulty, Generator, Unreachable
from router.dispatch.link import Reply, broken, failure_of, faulty, refused, reply_of
from router.dispatch.request import PreparedRequest


class TranslatedLink:
    """What `Generator` makes of an engine's answer."""

    def __init__(self, generator: Generator, worker: str) -> None:
        """`worker`: its name, for messages."""
        self._generator = generator
        self._worker = worker

    async def generate(self, request: PreparedRequest, timeout_s: float | None) -> AsyncGenerator[Reply, None]:
        """See `WorkerLink`."""
        try:
            async with aclosing(self._generator.generate(request.message, timeout_s, request.source)) as messages:
                async for message in messages:
                    reply = reply_of(message)
                    yield reply
                    if reply.kind == "end":
                        return
            raise broken(self._worker, "the answer ended without its last message")
        except grpc.aio.AioRpcError as error:
            raise failure_of(error, self._worker) from error
        except Faulty as error:
            raise faulty(self._worker, str(error)) from error
        except Unreachable as error:
            raise broken(self._worker, str(error)) from error
        except RadixfleetError as error:
            raise refused(error) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise broken(self._worker, "the channel was closed") from None
