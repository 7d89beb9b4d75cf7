"""Everything that Prometheus and Grafana are given, in one folder: `radixfleet monitoring` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

DEFAULT_ROUTER = "127.0.0.1:7071"
"""host:port of the metrics of a router on this machine."""

_PROMETHEUS = "prometheus.yml"
_DISCOVERY = f"      - url: http://{DEFAULT_ROUTER}/sd\n        refresh_interval: 10s\n"


def prometheus_config(routers: Sequence[str]) -> str:
    """Configuration that asks these routers (host:port of their metrics) what to scrape."""
    text = (_source() / _PROMETHEUS).read_text()
    assert _DISCOVERY in text, "the configuration names the default router"
    return text.replace(_DISCOVERY, "".join(_DISCOVERY.replace(DEFAULT_ROUTER, router) for router in routers))


def write_bundle(folder: Path, routers: Sequence[str]) -> Sequence[Path]:
    """Write all files below `folder`, over those of the same names; returns their paths.

    Whatever the umask, all may read them: in containers Prometheus and Grafana are users of their own. No secret is in
    them.
    """
    written = []
    for name, source in _walk(_source(), Path()):
        path = folder / name
        _make(path.parent)
        if not path.exists():
            path.touch()
            path.chmod(0o644)
        path.write_text(prometheus_config(routers) if str(name) == _PROMETHEUS else source.read_text())
        written.append(path)
    return written


def _make(folder: Path) -> None:
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir()
        folder.chmod(0o755)


def _source() -> Traversable:
    return files("deploy.monitoring") / "files"


def _walk(folder: Traversable, name: Path) -> Sequence[tuple[Path, Traversable]]:
    found: list[tuple[Path, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        below = name / entry.name
        found += _walk(entry, below) if entry.is_dir() else [(below, entry)]
    return found
