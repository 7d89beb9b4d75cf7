from __future__ import annotations

import pytest

from router.worker_address import check_worker_address, engine_address, is_url


@pytest.mark.parametrize(
    ("written", "base", "root", "name"),
    [
        ("http://h:8000", "http://h:8000/v1", "http://h:8000", "openai@h:8000"),
        ("http://h:8000/", "http://h:8000/v1", "http://h:8000", "openai@h:8000"),
        ("http://h:8000/v1/", "http://h:8000/v1", "http://h:8000", "openai@h:8000"),
        ("https://h/openai/v1", "https://h/openai/v1", "https://h/openai", "openai@h"),
        ("https://h/api/v3", "https://h/api/v3", "https://h/api/v3", "openai@h"),
        ("http://[::1]:80/v1#a/b", "http://[::1]:80/v1", "http://[::1]:80", "openai@[::1]:80#a/b"),
        ("http://h:1#llama3%3A8b", "http://h:1/v1", "http://h:1", "openai@h:1#llama3:8b"),
    ],
)
def test_what_an_address_means(written: str, base: str, root: str, name: str) -> None:
    address = engine_address(written)
    assert (address.base, address.root, address.name) == (base, root, name)
    assert is_url(written)


@pytest.mark.parametrize(
    "written",
    [
        "ftp://h:1",
        "http://",
        "http://:80",
        "http://u:p@h:1",
        "http://h:99999",
        "http://h:0",
        "http://h:1#",
        "http://h:1?key=x",
        "http://[::1",
        "http://a b:1",
        f"http://{'a' * 254}",
        "h:1",
    ],
)
def test_what_is_none(written: str) -> None:
    with pytest.raises(ValueError, match=r"^must "):
        engine_address(written)


@pytest.mark.parametrize("written", ["h:1", "[::1]:65535", "http://h:1"])
def test_an_address_of_a_worker(written: str) -> None:
    check_worker_address(written)


@pytest.mark.parametrize("written", ["", "h", "h:", ":1", "h:0", "h:65536", "::1:1", "h:1/x", "http://"])
def test_no_address_of_a_worker(written: str) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        check_worker_address(written)


@pytest.mark.parametrize("written", ["a" * 100_000 + ":1", "http://h:1#" + "a" * 100_000])
def test_an_endless_address_is_refused_and_not_repeated(written: str) -> None:
    with pytest.raises(ValueError, match=r"^must be at most 512 characters long; has 1000\d\d$"):
        check_worker_address(written)


def test_workers_that_speak_grpc_are_no_urls() -> None:
    assert not is_url("h:1")
    assert not is_url("[::1]:1")


def test_a_key_in_an_address_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="--engine-api-key") as error:
        engine_address("http://user:secret@h:1")
    assert "secret" not in str(error.value)
