"""`radixfleet keys`, what commands dial with, and what `up` passes on to its processes."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from deploy.commands.keys import keys
from deploy.endpoints import endpoint_option
from deploy.local_access import LocalAccess
from radixfleet.endpoint import Endpoint
from radixfleet.guard import Door, Guard
from radixfleet.keys import key_hash, key_line, watch_keys, watch_token
from radixfleet.watched_file import UnusableFile
from tests.support.certificates import Authority
from worker.config import WorkerSettings

TOKEN = "token-0123456789"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(keys, ["new", *arguments])


def test_a_new_key_opens_the_door_that_its_line_unlocks() -> None:
    shown = dict(line.split(maxsplit=1) for line in run("alice").stdout.splitlines())
    guard = Guard(watch_keys([shown["line"]]), lambda: [TOKEN])
    assert guard.admit(Door.CLIENT, shown["key"]).name == "alice"


def test_lines_are_added_to_a_file_that_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = run("alice", "--file", str(path)).stdout.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().rstrip("\n"))  # as some editors leave it
    second = run("bob", "--file", str(path)).stdout.strip()
    ring = watch_keys([str(path)])()
    assert (ring[key_hash(first)], ring[key_hash(second)]) == ("alice", "bob")
    assert first not in path.read_text()


def test_a_file_that_servers_would_refuse_gets_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("what is this\n")
    refused = run("alice", "--file", str(path))
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "must hold lines NAME:SHA256" in refused.stderr
    assert path.read_text() == "what is this\n"


def test_a_second_key_of_a_name_is_no_accident(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = run("alice", "--file", str(path)).stdout.strip()
    refused = run("alice", "--file", str(path))
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "has 1 key of alice: --add another one, or --replace" in refused.stderr
    second = run("alice", "--file", str(path), "--add").stdout.strip()
    assert set(watch_keys([str(path)])()) == {key_hash(first), key_hash(second)}


def test_replacing_takes_the_old_keys_away_and_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    path, link = tmp_path / "keys", tmp_path / "link"
    link.symlink_to(path)
    bob = key_line("bob", "two")
    path.write_text(f"# the team\n{key_line('alice', 'one')}  # since May\n{bob}\n{key_line('alice', 'three')}")
    path.chmod(0o640)
    key = run("alice", "--file", str(link), "--replace").stdout.strip()
    assert path.read_text() == f"# the team\n{bob}\n{key_line('alice', key)}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["keys", "link"]


def test_replacing_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group may write the file, and only its owner may give it its owner back."""
    path = tmp_path / "keys"
    run("alice", "--file", str(path))
    before = path.read_text()

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.chown", refused)
    result = run("alice", "--file", str(path), "--replace")
    assert (result.exit_code, "Operation not permitted" in result.stderr) == (1, True)
    assert (path.read_text(), list(tmp_path.iterdir())) == (before, [path])


def test_replacing_makes_a_file_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    run("alice", "--file", str(path), "--replace")
    assert list(watch_keys([str(path)])().values()) == ["alice"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_token_is_one_that_servers_take(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(run("--token").stdout)
    assert len(watch_token(f"@{tmp_path / 'token'}")()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        *[(), ("a b",), ("admin",), ("alice", "--token"), ("--token", "--file", "f")],
        *[("alice", "--add"), ("alice", "--replace"), ("alice", "--file", "f", "--add", "--replace")],
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@click.command()
@endpoint_option
def dialling(endpoint: Endpoint) -> None:
    """Says what it would dial."""
    click.echo(f"{endpoint} tls={endpoint.tls} key={endpoint.shown_key()}")


def dial(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(dialling, arguments, env=environment)


def test_commands_dial_this_machine_in_plain_unless_told_otherwise() -> None:
    assert dial().stdout == "127.0.0.1:7070 tls=None key=None\n"


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("rfk_1\nsomething else\n")
    assert "key=rfk_1\n" in dial("--api-key", f"@{tmp_path / 'key'}").stdout
    assert "key=rfk_2\n" in dial(RADIXFLEET_API_KEY="rfk_2").stdout
    assert "key=None\n" in dial(RADIXFLEET_API_KEY="").stdout
    missing = dial("--api-key", "@no-such-file").exception
    assert isinstance(missing, UnusableFile)


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key", "--tls-peer-name"])
def test_what_only_tls_uses_needs_it_on(option: str) -> None:
    wrong = dial(option, "x")
    assert (wrong.exit_code, "--tls-ca" in wrong.stderr) == (2, True)


def test_a_key_that_would_cross_a_network_unencrypted_is_warned_of() -> None:
    assert "unencrypted" in dial("--endpoint", "10.0.0.1:7070", "--api-key", "k").stderr
    for quiet in (
        ("--endpoint", "[::1]:7070", "--api-key", "k"),
        ("--endpoint", "10.0.0.1:7070"),
        ("--endpoint", "10.0.0.1:7070", "--api-key", "k", "--tls-ca", "system"),
    ):
        assert dial(*quiet).stderr == ""


def passed_on(run_dir: Path, **values: Any) -> LocalAccess:
    return LocalAccess.from_settings(WorkerSettings(model="m", **values), run_dir)


def test_up_without_keys_passes_nothing_on(tmp_path: Path) -> None:
    access = passed_on(tmp_path)
    assert set(access.options.values()) == {None, (), False}
    assert access.token_file is None
    assert list(tmp_path.iterdir()) == []
    assert access.flags("h:1") == " --endpoint h:1"


def test_up_makes_a_token_for_a_fleet_with_keys_and_shows_it_to_its_user_alone(tmp_path: Path) -> None:
    access = passed_on(tmp_path / "run", api_keys=(key_line("alice", "k"),))
    assert access.token_file is not None
    assert stat.S_IMODE(access.token_file.stat().st_mode) == 0o600
    assert access.options["admin_token"] == f"@{access.token_file}"
    assert access.endpoint("h:1").shown_key() == access.token_file.read_text().strip()
    again = passed_on(tmp_path / "run", api_keys=(key_line("alice", "k"),))
    assert again.endpoint("h:1").shown_key() == access.token_file.read_text().strip()


def test_a_token_on_the_command_line_of_up_is_not_on_those_of_its_processes(tmp_path: Path) -> None:
    access = passed_on(tmp_path, admin_token=TOKEN)
    assert access.endpoint("h:1").shown_key() == TOKEN
    assert TOKEN not in str(access)


def test_up_takes_a_token_file_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    access = passed_on(tmp_path / "run", admin_token=f"@{tmp_path / 'token'}")
    assert access.token_file == tmp_path / "token"
    assert not (tmp_path / "run").exists()


def test_up_with_tls_needs_the_ca_and_tells_how_to_call(tmp_path: Path) -> None:
    authority = Authority()
    pair, ca = authority.issue("fleet", tmp_path), authority.write(tmp_path)
    for half in ({"tls_cert": pair.cert, "tls_key": pair.key}, {"tls_ca": ca}):
        with pytest.raises(UnusableFile, match="--tls-cert and --tls-ca go together"):
            passed_on(tmp_path, **half)
    access = passed_on(tmp_path, tls_cert=pair.cert, tls_key=pair.key, tls_ca=ca, tls_client_ca=ca)
    assert access.flags("h:1") == f" --endpoint h:1 --tls-ca {ca} --tls-cert YOURS --tls-key YOURS"
