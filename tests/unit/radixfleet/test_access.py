"""Settings become what guards a process, or an error that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixfleet.access import Access
from radixfleet.guard import Door
from radixfleet.keys import key_line
from radixfleet.settings import SettingsError, load
from radixfleet.watched_file import UnusableFile
from router.config import RouterSettings
from tests.support.certificates import Authority
from worker.config import WorkerSettings

TOKEN = "token-0123456789"


def router(**values: Any) -> RouterSettings:
    return RouterSettings(**values)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    authority = Authority()
    pair = authority.issue("fleet", tmp_path)
    return {"tls_ca": authority.write(tmp_path), "tls_cert": pair.cert, "tls_key": pair.key}


def test_nothing_set_is_open_and_without_tls() -> None:
    access = Access.from_settings(router())
    assert access.guard.is_open
    assert access.ssl_context() is None
    endpoint = access.endpoint("w:1")
    assert (str(endpoint), endpoint.tls, endpoint.shown_key()) == ("w:1", None, None)


def test_peers_are_shown_certificate_and_first_token(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}-new\n{TOKEN}\n")
    access = Access.from_settings(router(**files, admin_token=f"@{tmp_path / 'token'}", tls_peer_name="fleet"))
    endpoint = access.endpoint("w:1")
    assert endpoint.shown_key() == f"{TOKEN}-new"
    assert endpoint.tls is not None
    assert (endpoint.tls.cert, endpoint.tls.peer_name) == (files["tls_cert"], "fleet")
    assert access.guard.admit(Door.ADMIN, TOKEN).is_admin
    assert TOKEN not in repr(endpoint) + repr(access)


@pytest.mark.parametrize("kind", [RouterSettings, WorkerSettings])
def test_settings_do_not_show_the_token(kind: type[Any]) -> None:
    model = {"model": "m"} if kind is WorkerSettings else {}
    settings = kind(admin_token=TOKEN, **model)
    assert TOKEN not in repr(settings) + str(settings) + settings.model_dump_json()


@pytest.mark.parametrize("written", ["1234567890123456", "[token-0123456789]", "{a: token-0123456789}"])
def test_a_token_that_is_no_text_is_refused_without_showing_it(tmp_path: Path, written: str) -> None:
    (tmp_path / "router.yaml").write_text(f"admin_token: {written}\n")
    with pytest.raises(SettingsError, match=r"admin_token in .* must be text") as caught:
        load(RouterSettings, {}, tmp_path / "router.yaml")
    assert "0123456789" not in str(caught.value)
    assert "1234567890" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"api_keys": (key_line("a", "k"),)}, "api_keys needs admin_token"),
        ({"tls_cert": "C"}, "tls_cert and tls_key go together"),
        ({"tls_client_ca": "C"}, "needs tls_cert and tls_key"),
        ({"tls_peer_name": "fleet"}, "tls_peer_name needs tls_ca"),
        ({"tls_ca": "no-such-file"}, "cannot read no-such-file"),
        ({"admin_token": "short"}, "at least 16 characters"),
        ({"admin_token": ""}, "at least 16 characters"),
        ({"admin_token": "@no-such-file"}, "cannot read no-such-file"),
    ],
)
def test_what_is_missing_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableFile, match=message):
        Access.from_settings(router(**values))


@pytest.mark.parametrize("written", ["", " ", ("",), [","]])
def test_keys_of_a_variable_that_is_not_set_do_not_open_the_doors(written: Any) -> None:
    with pytest.raises(SettingsError, match="--api-keys is empty: name keys, or leave it out"):
        load(RouterSettings, {"api_keys": written})
    assert load(RouterSettings, {"api_keys": []}).api_keys == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_who_listens_on_this_machine_alone_is_not_warned(host: str) -> None:
    assert Access.from_settings(router()).warnings(host) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.example"])
def test_who_is_open_to_a_network_is_told_what_to_set(host: str, files: dict[str, Path]) -> None:
    (open_to_all,) = Access.from_settings(router()).warnings(host)
    assert "--api-keys" in open_to_all
    (unencrypted,) = Access.from_settings(router(admin_token=TOKEN)).warnings(host)
    assert "--tls-cert" in unencrypted
    assert Access.from_settings(router(admin_token=TOKEN, **files)).warnings(host) == []
    assert Access.from_settings(router(**files, tls_client_ca=files["tls_ca"])).warnings(host) == []
    assert "--api-keys" in Access.from_settings(router(**files)).warnings(host)[0]
