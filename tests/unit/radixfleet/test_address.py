"""How servers are called, and how their addresses are published."""

import re

import pytest

from radixfleet.address import is_host_port, is_wildcard, local_address, publish, server_address, withdraw
from radixfleet.os_errors import reason_of


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


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu-3:80", "gpu-3:80"),
        ("127.0.0.1", "127.0.0.1:7070"),
        ("localhost", "localhost:7070"),
        ("[::1]", "[::1]:7070"),
        ("[::1]:9", "[::1]:9"),
        ("dns:///router.fleet.svc:7070", "dns:///router.fleet.svc:7070"),
        ("dns:///router", "dns:///router:7070"),
        ("DNS:router:7071", "DNS:router:7071"),
        ("dns://8.8.8.8/router", "dns://8.8.8.8/router:7070"),
        ("ipv4:10.0.0.1:7070,10.0.0.2:7070", "ipv4:10.0.0.1:7070,10.0.0.2:7070"),
        ("ipv6:[::1]:7070", "ipv6:[::1]:7070"),
        ("unix:/run/router.sock", "unix:/run/router.sock"),
        ("unix-abstract:router", "unix-abstract:router"),
        ("xds:///router", "xds:///router"),
        (" gpu-3\n", "gpu-3:7070"),
    ],
)
def test_a_server_is_called_at_its_address_with_the_routers_port_where_none_is_given(text, address):
    assert server_address(text) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write host:port"),
        ("7070", "write host:port"),
        (":7070", "write host:port"),
        ("a:", "write host:port"),
        ("a:0", "1 to 65535"),
        ("a:99999", "1 to 65535"),
        ("a:b", "write host:port"),
        ("::1", "[host]:port"),
        ("unix:", "write host:port"),
        ("dns:", "write host:port"),
        ("a:1/v1", "write host:port"),
        ("http://10.0.0.1:7072/v1", "the router's gRPC port (7070), not a URL (7072 is its port for HTTP)"),
        ("https://10.0.0.1", "not a URL"),
        ("grpc://10.0.0.1:7070", "not a URL"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        server_address(text)
    assert repr(text) in str(caught.value)


def test_only_wildcards_are_wildcards():
    assert [host for host in ("0.0.0.0", "::", "127.0.0.1", "10.0.0.0") if is_wildcard(host)] == ["0.0.0.0", "::"]


def test_an_address_is_published_whole_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "worker.address"
    publish(path, "127.0.0.1:1")
    publish(path, "127.0.0.1:23456")
    assert path.read_text() == "127.0.0.1:23456\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(tmp_path):
    with pytest.raises(OSError, match="cannot write the address file") as caught:
        publish(tmp_path / "nowhere" / "worker.address", "127.0.0.1:1")
    reason = reason_of(caught.value)
    assert reason == f"cannot write the address file {tmp_path}/nowhere/worker.address: No such file or directory"


def test_an_address_is_withdrawn_unless_another_process_has_published_its_own(tmp_path):
    path = tmp_path / "worker.address"
    withdraw(path, "127.0.0.1:1")
    publish(path, "127.0.0.1:2")
    withdraw(path, "127.0.0.1:1")
    assert path.exists()
    withdraw(path, "127.0.0.1:2")
    assert not path.exists()


@pytest.mark.parametrize(
    "text", ["h:1", "10.0.0.1:65535", "[::1]:80", "[fe80::1%eth0]:80", "w_0-a.b:1", "a" * 253 + ":1"]
)
def test_addresses_to_call(text):
    assert is_host_port(text)


@pytest.mark.parametrize(
    "text",
    ["", "h", "h:", ":1", "h:0", "h:65536", "::1:80", "http://h:1", "h:1/x", "h :1", "h#x:1", "ü:1", "a" * 254 + ":1"],
)
def test_what_is_no_address_to_call(text):
    assert not is_host_port(text)
