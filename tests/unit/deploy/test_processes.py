"""Children and their files."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import yaml

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


async def test_a_child_finds_its_settings_however_often_its_folder_is_deleted(tmp_path: Path) -> None:
    folder, spec = tmp_path / "cleaned", ChildSpec("router", ("router",), {}, {"admin_token": "sesame", "typo": 1})
    for _ in range(2):
        told = str(await (await Child.start(spec, folder)).died())
        assert "unknown setting typo in" in told
        file = folder / "router.yaml"
        assert yaml.safe_load(file.read_text()) == spec.settings
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        shutil.rmtree(folder)
