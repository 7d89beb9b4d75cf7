"""For which numbers of sequences a GPU's steps of decodes are recorded. Without torch: plans are made of it as well."""

from __future__ import annotations

LARGEST_SIZE = 256
"""With more sequences a step computes for longer than it takes to launch."""


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of sequences to record, ascending: padding costs little where the steps between them are small."""
    largest = min(max_rows, LARGEST_SIZE)
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, LARGEST_SIZE, 16)}
    return [*sorted(size for size in sizes if size < largest), largest]
