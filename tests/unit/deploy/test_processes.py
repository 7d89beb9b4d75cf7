"""Children and their files."""

from __future__ import annotations

import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from deploy.processes import Child, ChildSpec, write_secret


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


def test_two_who_write_one_secret_do_not_hinder_each_other(tmp_path: Path) -> None:
    """As router and worker, who start again at once after their folder was deleted."""
    path = tmp_path / "run" / "admin-token"
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda _: write_secret(path, "sesame\n"), range(400)))
    assert path.read_text() == "sesame\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_what_is_printed_of_a_child_has_no_secrets() -> None:
    assert "sesame" not in repr(ChildSpec("router", ("router",), {}, {"admin_token": "sesame"}))
