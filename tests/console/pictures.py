"""The README's pictures of the consoles, from a real run: `python -m tests.console.pictures [--minutes 10]`.

Three simulated workers and a router on this machine, requests whose prompts share six beginnings (the first ones are
hot), and after some minutes one look at each console. Writes console.png and top.svg into deploy/pictures. For a
quiet machine: where it is busy, the simulated devices wait for its CPUs, and it shows as bubble.
"""

from __future__ import annotations

import asyncio
import io
import re
import tempfile
from pathlib import Path
from random import Random

import click
from rich.console import Console

from deploy.local_fleet import LocalFleet, LocalSpec
from deploy.top.screen import Frame, screen
from deploy.top.view import View
from radixfleet.client import Client
from radixfleet.errors import RadixfleetError
from radixfleet.overview import overview
from tests.support.browser import Browser, browser

FOLDER = Path(__file__).parents[2] / "deploy/pictures"
WORKERS = 3
SYSTEM_PROMPTS = (
    ("You are the support assistant of an online shop for bicycles.", 1500),
    ("You review changes to a Python code base and answer with a list of findings.", 1000),
    ("Summarize the meeting below in five lines, with names and dates.", 650),
    ("Translate to French, and keep the names of products as they are.", 400),
    ("Answer as a patient teacher of mathematics for children.", 300),
    ("Extract the addresses from the text as JSON.", 250),
)
WORDS = ("order", "wheel", "delivery", "price", "chain", "frame", "return", "invoice", "stock", "helmet", "light")
REQUESTS_PER_S = 5.0
WAVE_S = 150.0
"""Every so often the load goes from half to one and a half of that, and back."""


class Load:
    """Requests, at random times, until it is stopped. Counts what fails."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._random = Random(7)
        self._requests: set[asyncio.Task[None]] = set()
        self._beginnings = [f"{text} {self._words(length)}" for text, length in SYSTEM_PROMPTS]
        self.failed = 0

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            request = loop.create_task(self._request())
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
            share = 0.5 + abs((loop.time() / WAVE_S) % 2 - 1)
            await asyncio.sleep(self._random.expovariate(REQUESTS_PER_S * share))

    async def _request(self) -> None:
        index = min(len(self._beginnings) - 1, int(self._random.expovariate(0.6)))
        prompt = f"{self._beginnings[index]}\n{self._words(self._random.randint(20, 250))}"
        try:
            await self._client.complete(prompt, max_new_tokens=self._random.randint(40, 260), ignore_eos=True)
        except RadixfleetError:
            self.failed += 1

    def _words(self, count: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(count))


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="How long the fleet runs before it is looked at.")
@click.option("--model", default="demo", show_default=True, help="Whose tokenizer; the workers are simulated.")
def main(minutes: float, model: str) -> None:
    """Make the pictures."""
    asyncio.run(_run(60 * minutes, model))


async def _run(seconds: float, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = LocalSpec(
            num_workers=WORKERS,
            router_options={"port": 0, "metrics_port": 0, "http_port": 0, "console_prompts": True},
            worker_options={"model": model, "runner": "sim", "max_total_tokens": 60_000},
            run_dir=Path(folder) / "run",
        )
        async with LocalFleet(spec, click.echo) as fleet, Client(fleet.endpoint, timeout_s=120) as client:
            load = Load(client)
            running = asyncio.create_task(load.run())
            speeds = await _watched(client, seconds)
            _terminal(Frame(str(fleet.endpoint), overview(await client.fleet()), speeds=speeds[-120:]))
            url = f"http://{(spec.run_dir / 'router.address.http').read_text().strip()}/console"
            async with browser(Path(folder)) as chromium:
                await _page(chromium, url, FOLDER / "console.png")
            running.cancel()
            click.echo(f"{load.failed} requests failed")


async def _watched(client: Client, seconds: float) -> list[float]:
    """The fleet's speed, once a second."""
    speeds: list[float] = []
    while len(speeds) < seconds:
        await asyncio.sleep(1.0)
        speeds.append(overview(await client.fleet()).fleet.pace.output_tokens_per_s)
    return speeds


def _terminal(frame: Frame) -> None:
    """top.svg, without the fonts that rich would load from elsewhere."""
    width, height = 108, 16
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(screen(frame, View(selected="worker-1"), width=width, height=height))
    svg = console.export_svg(title="radixfleet top")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
    (FOLDER / "top.svg").write_text(svg)


async def _page(chromium: Browser, url: str, file: Path) -> None:
    async with chromium.page(1440, 1240) as page:
        await page.scheme("dark")
        await page.goto(url)
        await page.until(f"document.querySelectorAll('#worker-rows tr').length === {WORKERS}")
        await page.until("document.querySelectorAll('#hot-rows tr').length > 2")
        await page.until("document.querySelector('#speed-chart .line').getAttribute('d').length > 50")
        await page.screenshot(file)
    click.echo(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")  # noqa: ASYNC240


if __name__ == "__main__":
    main()
