"""Tables of settings and metrics, made from the code: `python -m deploy.reference` rewrites them in the documents.

Each table stands between `<!-- settings: NAME -->`, or `<!-- metrics: NAME -->`, and `<!-- end -->`. A test compares
what is committed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import click

from deploy.monitoring.catalog import families
from radixfleet.settings import ProcessSettings, click_options
from router.config import RouterSettings
from worker.config import WorkerSettings

DOCUMENTS = ("router/README.md", "worker/README.md", "deploy/monitoring/METRICS.md")
SETTINGS: Mapping[str, type[ProcessSettings]] = {"worker": WorkerSettings, "router": RouterSettings}
_TABLE = re.compile(r"(<!-- (settings|metrics): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOTES = re.compile(r"^(?P<text>.*?)\s*\[(?P<notes>[^\]]*)\]$", re.DOTALL)


def settings_table(cls: type[ProcessSettings]) -> str:
    """A Markdown table: option, default and bounds, meaning. The texts are those of `--help`."""
    command = click.command("settings")(click_options(cls)(lambda **_options: None))
    lines = ["| option | default, bounds | meaning |", "|---|---|---|"]
    for parameter in command.params:
        if not isinstance(parameter, click.Option) or parameter.name == "config":
            continue
        help_text = _NOTES.match(parameter.help or "")
        assert help_text, f"the help of {parameter.name} names no environment variable"
        notes = [note for note in help_text["notes"].split("; ") if not note.startswith("env ")]
        if isinstance(parameter.type, click.Choice):
            notes.append(", ".join(parameter.type.choices))
        cells = (" ".join(f"`{option}`" for option in parameter.opts), "; ".join(notes), help_text["text"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def metrics_table(process: str) -> str:
    """A Markdown table: name, type, unit, labels, meaning. The texts are those of the endpoint."""
    lines = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for each in families(process):
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.name}` | {each.kind} | {each.unit} | {labels} | {each.meaning} |")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """A document's text with every table made anew."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2], found[3]) + found[4], text)


def _table(kind: str, process: str) -> str:
    return settings_table(SETTINGS[process]) if kind == "settings" else metrics_table(process)


def main() -> None:
    """Rewrite the tables of all documents."""
    root = Path(__file__).parents[1]
    for path in (root / name for name in DOCUMENTS):
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
