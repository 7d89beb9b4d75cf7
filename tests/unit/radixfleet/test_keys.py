"""API keys and admin tokens: what is stored, what is accepted, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixfleet.clock import ManualClock
from radixfleet.keys import KEY_PREFIX, key_hash, key_line, new_key, watch_keys, watch_token
from radixfleet.watched_file import UnusableFile


def test_keys_are_long_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) >= 40 for key in keys)


def test_a_line_holds_the_hash_and_not_the_key() -> None:
    key = new_key()
    line = key_line("alice", key)
    assert key not in line
    assert line == f"alice:{key_hash(key)}"
    assert key_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "-a", "x" * 65, "admin", "été"])
def test_names_that_no_key_may_have(name: str) -> None:
    with pytest.raises(ValueError, match="key"):
        key_line(name, "k")


def test_keys_come_from_settings_and_from_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the team\n\n{key_line('bob', 'two')}  # since May\n{key_line('carol', 'three').upper()}\n")
    ring = watch_keys([key_line("alice", "one"), str(file)])()
    assert {ring[key_hash(key)] for key in ("one", "two")} == {"alice", "bob"}
    assert ring[key_hash("three")] == "CAROL"
    assert len(ring) == 3


def test_a_key_that_is_added_or_taken_from_the_file_counts_within_a_second(tmp_path: Path) -> None:
    clock = ManualClock()
    file = tmp_path / "keys"
    file.write_text(key_line("alice", "one") + "\n")
    keys = watch_keys([str(file)], clock)
    file.write_text(key_line("bob", "two") + "\n")
    clock.advance(1.0)
    assert list(keys().values()) == ["bob"]


@pytest.mark.parametrize("content", ["rfk_pasted_by_mistake_0123456789", "alice:abc", "alice", "admin:" + "0" * 64])
def test_a_line_that_is_none_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(UnusableFile, match=str(file)) as caught:
        watch_keys([str(file)])
    assert "pasted" not in str(caught.value)


def test_a_missing_file_of_keys_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UnusableFile, match="no-such-file"):
        watch_keys([str(tmp_path / "no-such-file")])


def test_a_token_is_itself_or_stands_in_a_file_of_several(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first-token-0123456789\nsecond-token-0123456789\n")
    assert watch_token("direct-token-0123456789")() == ["direct-token-0123456789"]
    assert watch_token(f"@{file}")() == ["first-token-0123456789", "second-token-0123456789"]


@pytest.mark.parametrize("token", ["short", "with a space in it, long", "ünïcödé-0123456789", "tab\tin-it-0123456789"])
def test_a_token_that_could_be_guessed_or_not_be_sent_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(UnusableFile, match="keys new --token") as caught:
        watch_token(token)
    assert token not in str(caught.value)


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UnusableFile, match="holds no token"):
        watch_token(f"@{tmp_path / 'token'}")
