"""Progress where there is no terminal: each text once, in order."""

import io

from rich.console import Console

from deploy.progress import Progress


def shown(*texts: str) -> list[str]:
    out = io.StringIO()
    with Progress(Console(file=out, width=20, markup=False)) as progress:
        for text in texts:
            progress(text)
    return out.getvalue().splitlines()


def test_a_text_that_comes_again_is_shown_once():
    assert shown("router: starting", "workers: 0 of 2 ready", "workers: 0 of 2 ready", "serving") == [
        "router: starting",
        "workers: 0 of 2 ready",
        "serving",
    ]


def test_news_of_several_lines_stays_whole():
    assert shown("worker-0 ended:\n  [last] line") == ["worker-0 ended:", "  [last] line"]


def test_a_terminal_shows_brackets_as_they_are():
    """Of the path of a model, say."""
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=60, markup=False)) as progress:
        progress("model: [/models/tiny] is read")
    assert "model: [/models/tiny] is read" in out.getvalue()
