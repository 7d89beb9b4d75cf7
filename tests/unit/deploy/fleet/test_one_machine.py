"""A fleet.yaml on plain processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.fleet.one_machine import on_one_machine
from deploy.fleet.spec import FleetSpec, parse_spec
from radixfleet.tls import ClientTls
from tests.support.certificates import Authority

FILE = """
routers: {count: 2, settings: {port: 7000, policy: sglang}}
models:
  a: {workers: {min: 2, max: 9}, settings: {model: demo, device: cpu, threads: 3}}
  b/c: {workers: 1, settings: {model: demo, device: cpu, api_keys: [KEYS]}}
"""


@pytest.fixture
def text(tmp_path: Path) -> str:
    keys = tmp_path / "keys.txt"
    keys.write_text("me:" + "0" * 64 + "\n")
    return FILE.replace("KEYS", str(keys))


def test_the_least_number_of_workers_of_every_model_each_with_its_settings(text: str, tmp_path: Path) -> None:
    fleet, _ = on_one_machine(parse_spec(text), tmp_path / "run")
    assert fleet.num_workers == 3
    children = [fleet.worker(index, "127.0.0.1:7000") for index in range(3)]
    assert [child.name for child in children] == ["a-0", "a-1", "b/c-0"], "as the router calls them"
    first, last = children[0].settings, children[2].settings
    assert first is not None
    assert last is not None
    assert (first["worker_id"], first["routers"], first["served_model_name"]) == ("a-0", ["127.0.0.1:7000"], "a")
    assert first["threads"] == 3, "what the file says goes before a share of the machine"
    assert (last["worker_id"], last["served_model_name"]) == ("b/c-0", "b/c")
    assert last["threads"] >= 1


def test_the_router_has_the_files_settings(text: str, tmp_path: Path) -> None:
    fleet, _ = on_one_machine(parse_spec(text), tmp_path / "run")
    settings = fleet.router().settings
    assert settings is not None
    assert settings["policy"] == "sglang"


def test_stopping_waits_for_the_longest_drain_of_the_file(text: str, tmp_path: Path) -> None:
    longer = text.replace("threads: 3", "threads: 3, drain_grace_s: 90")
    assert on_one_machine(parse_spec(longer), tmp_path / "run")[0].drain_grace_s == 90


def one_model(routers: Mapping[str, Any], model: Mapping[str, Any]) -> FleetSpec:
    """A fleet of one worker; the settings as YAML has them."""
    worker = {"model": "demo", "device": "cpu", **model}
    models = {"m": {"workers": 1, "settings": {name: _plain(value) for name, value in worker.items()}}}
    settings = {name: _plain(value) for name, value in routers.items()}
    return parse_spec(yaml.safe_dump({"routers": {"settings": settings}, "models": models}))


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def test_who_asks_the_router_shows_the_routers_token(tmp_path: Path) -> None:
    """With that of a model's workers, `up` was refused, and said nothing while it asked on."""
    for name in ("routers", "model"):
        (tmp_path / name).write_text(f"of-the-{name}-0123")
    routers = {"api_keys": ["me:" + "0" * 64], "admin_token": f"@{tmp_path / 'routers'}"}
    fleet, access = on_one_machine(one_model(routers, {"admin_token": f"@{tmp_path / 'model'}"}), tmp_path)
    assert access.endpoint("h:1").shown_key() == "of-the-routers-0123"
    assert fleet.endpoint("h:1").shown_key() == "of-the-routers-0123"


def test_a_router_that_serves_tls_is_dialled_as_its_workers_dial_it(tmp_path: Path) -> None:
    """It was refused by the name of an option that cannot be given: a router of its own has no use for the CA."""
    authority = Authority()
    pair, ca = authority.issue("router", tmp_path), authority.write(tmp_path)
    spec = one_model({"tls_cert": pair.cert, "tls_key": pair.key}, {"tls_ca": ca, "tls_peer_name": "router"})
    fleet, access = on_one_machine(spec, tmp_path / "run")
    assert fleet.endpoint("h:1").tls == ClientTls(ca, pair.cert, pair.key, "router")
    assert access.flags("h:1") == f" --endpoint h:1 --tls-ca {ca} --tls-peer-name router"
    assert fleet.router().settings == {**spec.router_settings(0)}, "nothing is added to the file"


def test_a_router_that_asks_for_certificates_is_shown_a_workers(tmp_path: Path) -> None:
    """Its own is signed by the CA that its clients know, and that need not be the one it asks for."""
    public, fleets = Authority("public"), Authority("fleet")
    router, worker = public.issue("router", tmp_path), fleets.issue("worker", tmp_path)
    public_ca, fleet_ca = public.write(tmp_path, "public"), fleets.write(tmp_path, "fleet")
    spec = one_model(
        {"tls_cert": router.cert, "tls_key": router.key, "tls_client_ca": fleet_ca, "tls_ca": fleet_ca},
        {"tls_cert": worker.cert, "tls_key": worker.key, "tls_ca": public_ca},
    )
    fleet, _ = on_one_machine(spec, tmp_path / "run")
    assert fleet.endpoint("h:1").tls == ClientTls(public_ca, worker.cert, worker.key, None)


def test_a_router_that_serves_plain_is_dialled_so_however_it_dials_its_workers(tmp_path: Path) -> None:
    """`up` spoke TLS to it, which it took for a router that is not up yet, without end."""
    authority = Authority()
    pair, ca = authority.issue("worker", tmp_path), authority.write(tmp_path)
    spec = one_model({"tls_ca": ca, "tls_peer_name": "worker"}, {"tls_cert": pair.cert, "tls_key": pair.key})
    fleet, access = on_one_machine(spec, tmp_path / "run")
    assert fleet.endpoint("h:1").tls is None
    assert access.flags("h:1") == " --endpoint h:1"


def test_a_fleet_whose_workers_alone_have_keys_gets_a_token_for_both_sides(tmp_path: Path) -> None:
    """A worker with keys and no token ends at once."""
    fleet, access = on_one_machine(one_model({}, {"api_keys": ["me:" + "0" * 64]}), tmp_path)
    token = f"@{access.token_file}"
    for child in (fleet.router(), fleet.worker(0, "h:1")):
        assert child.settings is not None
        assert child.settings["admin_token"] == token


def test_what_is_printed_of_a_fleet_has_no_token(tmp_path: Path) -> None:
    fleet, _ = on_one_machine(
        one_model({"admin_token": "sesame-0123456789"}, {"admin_token": "sesame-0123456789"}), tmp_path
    )
    assert "sesame" not in repr(fleet)
