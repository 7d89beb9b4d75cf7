"""What a killed process leaves behind is removed by the next one, and nothing else is."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.own_folder import own_folder

HOLDER = """
import sys
from pathlib import Path
from router.own_folder import own_folder
with own_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with own_folder(tmp_path) as folder:
        (folder / "0.sock").touch()
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_a_folder_is_locked_against_those_who_tidy_up(tmp_path: Path) -> None:
    with own_folder(tmp_path) as folder:
        other = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            theirs = Path(holder.stdout.readline().strip())
            with own_folder(tmp_path) as ours:
                assert theirs.is_dir()
        finally:
            holder.kill()
    assert theirs.is_dir()
    with own_folder(tmp_path) as ours:
        assert list(tmp_path.iterdir()) == [ours]


def test_what_is_no_such_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "radixfleet-router-being-made").mkdir()
    (tmp_path / "radixfleet-router-file").touch()
    (tmp_path / "radixfleet-router-link").symlink_to(tmp_path)
    (tmp_path / "lock").touch()
    with own_folder(tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 4
