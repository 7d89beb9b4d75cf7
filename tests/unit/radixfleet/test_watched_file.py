"""Values of files are read again when the files change, and a bad change takes nothing down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog

from radixfleet.clock import ManualClock
from radixfleet.watched_file import UnusableFile, Watched, read_file


class Reading:
    """A watched file with a number in it, on a clock that stands still."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.num_reads = 0
        self._path = path
        self.watched = Watched([path], self._read, self.clock)

    def _read(self) -> int:
        self.num_reads += 1
        text = read_file(self._path).decode()
        if not text.isdigit():
            raise UnusableFile(f"{self._path} holds no number")
        return int(text)

    def later(self) -> int:
        self.clock.advance(1.0)
        return self.watched.current()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


def test_an_unchanged_file_is_read_once(path: Path) -> None:
    reading = Reading(path)
    assert [reading.later(), reading.later()] == [1, 1]
    assert reading.num_reads == 1


def test_a_change_is_taken_up_within_a_second(path: Path) -> None:
    reading = Reading(path)
    path.write_text("22")
    assert reading.watched.current() == 1  # not looked at again yet
    assert reading.later() == 22


def test_a_file_that_is_replaced_by_another_of_the_same_size_and_time_is_seen(path: Path) -> None:
    reading = Reading(path)
    other = path.with_name("other")
    other.write_text("2")
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert reading.later() == 2


def test_the_target_of_a_link_is_exchanged_as_kubernetes_does(tmp_path: Path) -> None:
    for name, number in (("old", "1"), ("new", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "number").write_text(number)
    (tmp_path / "data").symlink_to("old")
    (tmp_path / "number").symlink_to("data/number")
    reading = Reading(tmp_path / "number")
    (tmp_path / "data-next").symlink_to("new")
    (tmp_path / "data-next").replace(tmp_path / "data")
    assert reading.later() == 2


@pytest.mark.parametrize("damage", ["spoilt", "gone"])
def test_the_last_good_value_stays_and_the_log_says_why_once(path: Path, damage: str) -> None:
    reading = Reading(path)
    if damage == "gone":
        path.unlink()
    else:
        path.write_text("no number")
    with structlog.testing.capture_logs() as lines:
        assert [reading.later(), reading.later()] == [1, 1]
    assert [line["log_level"] for line in lines] == ["error"]
    assert str(path) in lines[0]["error"]
    path.write_text("333")
    assert reading.later() == 333


def test_a_file_that_is_bad_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnusableFile, match=r"cannot read .*missing"):
        Reading(tmp_path / "missing")
