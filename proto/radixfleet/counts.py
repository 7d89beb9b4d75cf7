"""Numbers of things, in words for people."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """1 token, 2 tokens."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
