"""Children and their files."""

from __future__ import annotations

import shutil
from pathlib import Path

from deploy.processes import Child, ChildSpec


async def test_a_child_whose_folder_was_deleted_can_be_started_and_its_end_told(tmp_path: Path) -> None:
    """/tmp is cleaned now and then."""
    folder = tmp_path / "cleaned"
    child = await Child.start(ChildSpec("organisation/model-0", ("no-such-command",), {}), folder)
    assert child.log_path == folder / "organisation+model-0.log"
    told = str(await child.died())
    assert told.startswith("organisation/model-0 ended with exit code 2")
    assert "no-such-command" in told
    shutil.rmtree(folder)
    assert "(it printed nothing)" in str(await child.died())
