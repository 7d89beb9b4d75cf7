"""Tests of clusters take minutes: they run when they are asked for, by `pytest -m cluster`."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `cluster`, unless the marker was named."""
    if "cluster" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("cluster")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
