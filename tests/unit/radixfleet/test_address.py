"""How servers are called, and how their addresses are published."""

import pytest

from radixfleet.address import is_wildcard, local_address, publish


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:7"),
        ("0.0.0.0", "127.0.0.1:7"),
        ("::", "127.0.0.1:7"),
        ("::1", "[::1]:7"),
        ("gpu-3.example", "gpu-3.example:7"),
    ],
)
def test_local_address(host, address):
    assert local_address(host, 7) == address


def test_only_wildcards_are_wildcards():
    assert [host for host in ("0.0.0.0", "::", "127.0.0.1", "10.0.0.0") if is_wildcard(host)] == ["0.0.0.0", "::"]


def test_an_address_is_published_whole_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "worker.address"
    publish(path, "127.0.0.1:1")
    publish(path, "127.0.0.1:23456")
    assert path.read_text() == "127.0.0.1:23456\n"
    assert list(tmp_path.iterdir()) == [path]
