"""The soak's load: clients that behave well, and clients that do everything else. Each act ends within seconds."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from random import Random

from radixfleet.answers import Delta, Started
from radixfleet.client import Client
from radixfleet.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, RadixfleetError, Unavailable

EXPECTED = (Unavailable, DeadlineExceeded, Overloaded, Cancelled)
"""What a client may be told while processes are killed and requests are aborted."""
_INJECTED = ("could not compute its step", "no valid probabilities")
"""What clients are told of steps that were made to fail."""
_VOCAB = 400
_CONTEXT = 4096


def is_injected(error: RadixfleetError) -> bool:
    """Whether a step failed because it was made to."""
    return any(text in str(error) for text in _INJECTED)


class Soaker:
    """One client after another, on a router and, beside it, on the workers themselves."""

    def __init__(self, router: str, workers: dict[str, str], seed: int) -> None:
        """`workers`: addresses by worker id."""
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        """What must not happen, in words."""
        self._router = router
        self._workers = workers
        self._random = Random(seed)
        prefixes = Random(0)
        self._prefixes = [[prefixes.randrange(3, _VOCAB) for _ in range(300)] for _ in range(8)]

    async def run(self, until_s: float) -> None:
        """Act after act, until the event loop's clock says `until_s`."""
        acts = [self._complete, self._leave, self._expire, self._abort, self._overlong, self._dawdle, self._several]
        weights = [6, 3, 1, 2, 1, 1, 1]
        while asyncio.get_running_loop().time() < until_s:
            (act,) = self._random.choices(acts, weights)
            direct = self._random.random() < 0.25
            address = self._random.choice(list(self._workers.values())) if direct else self._router
            try:
                async with asyncio.timeout(60), Client(address, timeout_s=30) as client:
                    await act(client)
            except EXPECTED as error:
                self.outcomes[type(error).__name__] += 1
                await asyncio.sleep(0.2)
            except RadixfleetError as error:
                if is_injected(error):
                    self.outcomes["failed step"] += 1
                    continue
                self.faults.append(f"{act.__name__}: {type(error).__name__}: {error}")
            except TimeoutError:
                self.faults.append(f"{act.__name__}: no end within 60 s")
            else:
                self.outcomes[act.__name__.strip("_")] += 1

    def _prompt(self) -> list[int]:
        tail = [self._random.randrange(3, _VOCAB) for _ in range(self._random.choice([1, 20, 200, 900]))]
        return self._random.choice(self._prefixes)[: self._random.choice([0, 64, 150, 300])] + tail

    async def _complete(self, client: Client) -> None:
        """All tokens come that were asked for."""
        wanted = self._random.randint(1, 60)
        done = await client.complete(self._prompt(), max_new_tokens=wanted, ignore_eos=True)
        if len(done.token_ids) != wanted:
            self.faults.append(f"{len(done.token_ids)} tokens instead of {wanted}, ended by {done.finished.reason}")

    async def _several(self, client: Client) -> None:
        """Completions that share their prompt."""
        await client.complete(self._prompt(), max_new_tokens=12, ignore_eos=True, n=3, temperature=1.0)

    async def _leave(self, client: Client) -> None:
        """Go away after some events, or before the first."""
        patience = self._random.randint(0, 12)
        async with aclosing(client.generate(self._prompt(), max_new_tokens=500, ignore_eos=True)) as events:
            if not patience:
                return
            async for _ in events:
                patience -= 1
                if not patience:
                    return

    async def _expire(self, client: Client) -> None:
        """A deadline that cannot be kept."""
        await client.complete(self._prompt(), max_new_tokens=2000, ignore_eos=True, timeout_s=self._random.random() / 2)

    async def _abort(self, client: Client) -> None:
        """Somebody else ends the request, on its worker."""
        async with aclosing(client.generate(self._prompt(), max_new_tokens=1500, ignore_eos=True)) as events:
            async for event in events:
                if isinstance(event, Started) and event.worker_id in self._workers:
                    async with Client(self._workers[event.worker_id], timeout_s=10) as other:
                        await other.abort(event.execution_id)

    async def _overlong(self, client: Client) -> None:
        """Refused, always."""
        try:
            await client.complete([5] * (_CONTEXT + 1), max_new_tokens=1)
        except InvalidRequest:
            return
        self.faults.append("a prompt longer than the context was accepted")

    async def _dawdle(self, client: Client) -> None:
        """Read slowly."""
        async with aclosing(client.generate(self._prompt(), max_new_tokens=30, ignore_eos=True)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    await asyncio.sleep(0.05)
