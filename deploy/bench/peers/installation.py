"""Which peers are installed, and installing them one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.bench.peers.catalog import PEERS, Peer
from deploy.bench.peers.environments import InstallFailed
from deploy.progress import Tell


def missing(names: Sequence[str], cache: Path, peers: Mapping[str, Peer] = PEERS) -> list[str]:
    """Those that are not installed."""
    return [name for name in names if not peers[name].is_installed(peers[name].folder(cache))]


def install(names: Sequence[str], cache: Path, tell: Tell, peers: Mapping[str, Peer] = PEERS) -> dict[str, str]:
    """Install what is missing; why it failed, by name, of those that did."""
    failures: dict[str, str] = {}
    for name in names:
        peer = peers[name]
        if peer.is_installed(peer.folder(cache)):
            tell(f"{name}: installed in {peer.folder(cache)}")
            continue
        try:
            peer.install(peer.folder(cache), lambda text, name=name: tell(f"{name}: {text}"))  # type: ignore[misc]
            tell(f"{name}: installed in {peer.folder(cache)}")
        except InstallFailed as error:
            failures[name] = str(error)
            tell(f"{name}: {error}")
    return failures


def install_command(names: Sequence[str]) -> str:
    """What installs them."""
    return f"radixfleet bench engine --peers {','.join(names)} --install"
