"""What an operator reads of errors of the system."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from radixfleet.os_errors import reason_of, why_not_bound


def test_a_reason_names_the_file_and_no_number(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno 2") as caught:
        (tmp_path / "none").read_text()
    assert reason_of(caught.value) == f"{tmp_path}/none: No such file or directory"
    assert reason_of(OSError(98, "cannot serve")) == "cannot serve"
    assert reason_of(OSError("only words")) == "only words"


def test_why_nobody_can_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert why_not_bound("127.0.0.1", port) == "Address already in use"
        with pytest.raises(OSError, match="in use") as caught:
            socket.create_server(("127.0.0.1", port))
        assert reason_of(caught.value) == "Address already in use"
    assert why_not_bound("127.0.0.1", port) is None
    assert why_not_bound("203.0.113.7", 0) == "Cannot assign requested address"
    assert why_not_bound("nowhere.invalid", 0)


def test_one_free_address_of_a_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        assert why_not_bound("both", port) is None
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses[:1])
        assert why_not_bound("one", port) == "Address already in use"


def test_a_kind_of_address_that_the_machine_lacks_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` where IPv6 is switched off in the kernel, and not in /etc/hosts."""
    unknown = 4095
    addresses = [(kind, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)) for kind in (unknown, socket.AF_INET)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    assert why_not_bound("both", 0) is None
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses[:1])
    assert why_not_bound("lacking", 0) == "Address family not supported by protocol"
