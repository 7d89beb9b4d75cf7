from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, namespace, seed_hash
from radixfleet.v1 import inference_pb2
from router.api.plain_text import stand_ins, text_of

SEED = seed_hash(namespace("m"))


def prompt(text: str) -> inference_pb2.Prompt:
    return inference_pb2.Prompt(text=text)


def chat(*messages: tuple[str, str]) -> inference_pb2.Prompt:
    return inference_pb2.Prompt(
        chat=inference_pb2.Chat(
            messages=[inference_pb2.ChatMessage(role=role, content=text) for role, text in messages]
        )
    )


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_text_comes_back(text: str) -> None:
    assert text_of(stand_ins(prompt(text))) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=3000), st.text(max_size=20, alphabet="ab"))
def test_what_follows_changes_no_whole_block_before_it(text: str, more: str) -> None:
    whole_blocks = len(text.encode()) // (4 * BLOCK_TOKENS)
    before = chain_hashes(SEED, stand_ins(prompt(text)))[:whole_blocks]
    after = chain_hashes(SEED, stand_ins(prompt(text + more)))[:whole_blocks]
    assert before.tolist() == after.tolist()


def test_four_bytes_are_a_token() -> None:
    assert len(stand_ins(prompt("a" * 400))) == 100
    assert len(stand_ins(prompt("a" * 401))) == 101
    assert len(stand_ins(prompt(""))) == 0


def test_a_chat_grows_at_its_end() -> None:
    first = stand_ins(chat(("system", "x" * 2000), ("user", "one")))
    later = stand_ins(chat(("system", "x" * 2000), ("user", "one"), ("assistant", "two"), ("user", "three")))
    whole = len(first) - 1
    assert first[:whole].tolist() == later[:whole].tolist()


def test_who_says_something_matters() -> None:
    assert stand_ins(chat(("user", "hi"))).tolist() != stand_ins(chat(("system", "hi"))).tolist()
