"""A fleet.yaml on plain processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.fleet.one_machine import on_one_machine
from deploy.fleet.spec import parse_spec

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


def test_who_asks_the_router_shows_the_routers_token(tmp_path: Path) -> None:
    """With that of a model's workers, `up` was refused, and said nothing while it asked on."""
    routers = "{settings: {api_keys: [KEYS], admin_token: of-the-routers-0123}}".replace("KEYS", "me:" + "0" * 64)
    models = "{m: {workers: 1, settings: {model: demo, device: cpu, admin_token: of-the-worker-0123}}}"
    fleet, access = on_one_machine(parse_spec(f"routers: {routers}\nmodels: {models}"), tmp_path)
    assert access.endpoint("h:1").shown_key() == "of-the-routers-0123"
    assert fleet.endpoint("h:1").shown_key() == "of-the-routers-0123"
