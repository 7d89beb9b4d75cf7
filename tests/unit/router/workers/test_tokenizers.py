from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.workers.tokenizers import TokenizerStore
from tests.support.byte_tokenizer import byte_spec
from tests.support.foreign_engine import archive

SPEC = byte_spec()


@pytest.fixture
def store() -> Iterator[TokenizerStore]:
    with ThreadPoolExecutor(1) as threads:
        yield TokenizerStore(threads)


async def test_many_workers_with_one_tokenizer_fetch_it_once(store: TokenizerStore) -> None:
    fetches = 0

    async def fetch() -> bytes:
        nonlocal fetches
        fetches += 1
        await asyncio.sleep(0)
        return SPEC.to_json()

    await asyncio.gather(*(store.ensure(SPEC.fingerprint(), fetch) for _ in range(20)))
    assert fetches == 1
    tokenizer = store.get(SPEC.fingerprint())
    assert tokenizer is not None
    assert tokenizer.encode("abc").tolist() == [97, 98, 99]


async def test_a_failed_fetch_is_tried_again_by_the_next(store: TokenizerStore) -> None:
    async def broken() -> bytes:
        raise ConnectionError

    async def fetch() -> bytes:
        return SPEC.to_json()

    with pytest.raises(ConnectionError):
        await store.ensure(SPEC.fingerprint(), broken)
    await store.ensure(SPEC.fingerprint(), fetch)
    assert store.get(SPEC.fingerprint()) is not None


@pytest.mark.parametrize("data", [SPEC.to_json(), b"{}", b"\xff\x00"])
async def test_what_is_not_the_named_tokenizer_is_refused(store: TokenizerStore, data: bytes) -> None:
    async def fetch() -> bytes:
        return data

    with pytest.raises(ValueError, match=r"\w"):
        await store.ensure(SPEC.fingerprint() + 1, fetch)
    assert store.get(SPEC.fingerprint() + 1) is None


async def test_tokenizers_that_no_worker_uses_are_forgotten(store: TokenizerStore) -> None:
    other = byte_spec(chat_template=None)
    for spec in (SPEC, other):

        async def fetch(data: bytes = spec.to_json()) -> bytes:
            return data

        await store.ensure(spec.fingerprint(), fetch)
    store.keep_only({other.fingerprint()})
    assert store.get(SPEC.fingerprint()) is None
    assert store.get(other.fingerprint()) is not None


async def test_files_are_read_once_while_an_engine_has_them(store: TokenizerStore) -> None:
    files, told = archive(SPEC), {"eos_token_ids": SPEC.eos_token_ids, "vocab_size": SPEC.vocab_size}
    known, fingerprint = await store.tokenizer_of(files, **told)
    assert (known.spec, fingerprint) == (SPEC, SPEC.fingerprint())
    assert store.get(fingerprint) is known
    again, other = await asyncio.gather(
        store.tokenizer_of(files, **told), store.tokenizer_of(files, **told | {"vocab_size": 999})
    )
    assert again == (known, fingerprint)
    assert (other[0].vocab_size, other[1] == fingerprint) == (999, False)
    store.keep_only({other[1]})
    anew, _ = await store.tokenizer_of(files, **told)
    assert anew is not known
    assert store.get(fingerprint) is anew


async def test_files_that_hold_no_tokenizer_are_refused_each_time(store: TokenizerStore) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="zip"):
            await store.tokenizer_of(b"no zip", eos_token_ids=(), vocab_size=1)
