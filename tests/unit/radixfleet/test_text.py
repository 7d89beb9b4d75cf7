"""Text to ids and back as the model's files say."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from radixfleet.errors import InvalidRequest
from radixfleet.text import Tokenizer, TokenizerSpec
from radixfleet.types import ChatMessage, ChatPrompt
from tests.support.small_tokenizers import byte_level, digits_then_bytes, metaspace, spec_of, word_piece

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
HF = byte_level()
START, END = HF.token_to_id("<|start|>"), HF.token_to_id("<|end|>")
PLAIN = spec_of(HF)
LLAMA = spec_of(
    HF, bos_token="<|start|>", bos_token_id=START, add_bos=True, eos_token_ids=(END,), chat_template=TEMPLATE
)


def ids_of(text: str) -> list[int]:
    return HF.encode(text, add_special_tokens=False).ids


class TestSpec:
    def test_travels_as_json(self):
        for spec in (PLAIN, LLAMA):
            assert TokenizerSpec.from_json(spec.to_json()) == spec

    @pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", PLAIN.to_json()[:-1]])
    def test_anything_else_is_a_value_error(self, data):
        with pytest.raises(ValueError, match=r"."):
            TokenizerSpec.from_json(data)

    def test_the_fingerprint_follows_every_field(self):
        changed = {
            "tokenizer_json": digits_then_bytes().to_str(),
            "chat_template": "x",
            "bos_token": "</s>",
            "eos_token": "</s>",
            "bos_token_id": 1,
            "eos_token_ids": (1,),
            "add_bos": False,
            "vocab_size": 7,
        }
        assert set(changed) == set(TokenizerSpec.__dataclass_fields__)
        fields = {name: getattr(LLAMA, name) for name in changed}
        prints = {TokenizerSpec(**{**fields, name: value}).fingerprint() for name, value in changed.items()}
        assert LLAMA.fingerprint() not in prints
        assert len(prints) == len(changed)

    def test_the_fingerprint_is_the_same_everywhere(self):
        spec = TokenizerSpec("{}", None, "<s>", "</s>", 1, (2,), True, 10)
        assert spec.fingerprint() == 0x283CBFE576B21E0
        assert TokenizerSpec.from_json(spec.to_json()).fingerprint() == spec.fingerprint()


class TestEncode:
    def test_special_tokens_in_the_text_are_recognised(self):
        tokens = Tokenizer(PLAIN).encode("hello<|end|>world")
        assert tokens.tolist() == [*ids_of("hello"), END, *ids_of("world")]
        assert tokens.dtype == np.uint32
        assert tokens.flags.c_contiguous

    @pytest.mark.parametrize("text", ["", "hello", "hello<|start|>", " <|start|>hello"])
    def test_bos_is_put_in_front(self, text):
        assert Tokenizer(LLAMA).encode(text).tolist() == [START, *ids_of(text)]
        assert Tokenizer(PLAIN).encode(text).tolist() == ids_of(text)

    def test_bos_is_not_put_in_front_of_itself(self):
        assert Tokenizer(LLAMA).encode("<|start|>hello").tolist() == [START, *ids_of("hello")]

    def test_nothing_is_added_behind(self):
        """A post-processor that closes the text, as BERT's, would make a prompt that is already over."""
        hf = word_piece()
        assert Tokenizer(spec_of(hf)).encode("hello").tolist() == hf.encode("hello", add_special_tokens=False).ids
        assert hf.encode("hello").ids[-1] == hf.token_to_id("[SEP]")

    def test_truncation_and_padding_of_the_file_are_ignored(self):
        hf = byte_level()
        hf.enable_truncation(2)
        hf.enable_padding(length=20)
        assert Tokenizer(spec_of(hf)).encode("hello world").tolist() == ids_of("hello world")

    def test_a_text_seen_before_comes_from_the_cache(self):
        tokenizer = Tokenizer(PLAIN)
        system, answer = "be kind " * 50, "hello"
        first = tokenizer.encode(f"<|start|>{system}<|end|>")
        second = tokenizer.encode(f"<|start|>{system}<|end|><|start|>{answer}<|end|>")
        assert (tokenizer.cache.hits, tokenizer.cache.misses) == (2, 3)
        assert second.tolist() == [*first.tolist(), START, *ids_of(answer), END]

    def test_what_a_caller_gets_cannot_spoil_the_cache(self):
        tokens = Tokenizer(PLAIN).encode("hello")
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 0

    def test_a_lone_surrogate_is_refused(self):
        """Behaviour 42: it can come from JSON, which can write one."""
        tokenizer = Tokenizer(PLAIN)
        with pytest.raises(InvalidRequest, match="surrogate") as caught:
            tokenizer.encode("a\ud800<|end|>b")
        assert caught.value.field == "prompt"
        assert tokenizer.encode("a<|end|>b").tolist() == [*ids_of("a"), END, *ids_of("b")]

    def test_the_start_of_a_text_is_special_to_some_tokenizers(self):
        hf = metaspace("first")
        text = "hello<|end|>hello"
        expected = hf.encode(text, add_special_tokens=False)
        assert "▁" in expected.tokens[0]
        assert not expected.tokens[-1].startswith("▁")
        assert Tokenizer(spec_of(hf)).encode(text).tolist() == expected.ids

    def test_a_spec_that_is_no_tokenizer(self):
        with pytest.raises(ValueError, match="cannot be read"):
            Tokenizer(TokenizerSpec("{}", None, None, None, None, (), False, 1))


class TestChat:
    def test_the_template_says_whether_there_is_a_bos(self):
        """No BOS twice, and none where the template writes none."""
        messages = (ChatMessage("user", "hi"), ChatMessage("assistant", "ho"))
        tokenizer = Tokenizer(LLAMA)
        assert tokenizer.render_chat(ChatPrompt(messages)) == "<|start|>hi<|end|>ho<|end|>>"
        ids = tokenizer.encode_chat(ChatPrompt(messages)).tolist()
        assert ids == [START, *ids_of("hi"), END, *ids_of("ho"), END, *ids_of(">")]
        assert tokenizer.encode_chat(ChatPrompt(messages, add_generation_prompt=False))[-1] == END
        without = TokenizerSpec.from_json(LLAMA.to_json().replace(b"{{ bos_token }}", b""))
        assert Tokenizer(without).encode_chat(ChatPrompt(messages))[0] != START

    def test_prompts_of_every_form(self):
        tokenizer = Tokenizer(LLAMA)
        messages = (ChatMessage("user", "hi"),)
        assert tokenizer.encode_prompt("hi").tolist() == tokenizer.encode("hi").tolist()
        chat = tokenizer.encode_prompt(ChatPrompt(messages, add_generation_prompt=False))
        assert chat.tolist() == tokenizer.encode_chat(ChatPrompt(messages, add_generation_prompt=False)).tolist()
        ids = np.array([3, 1], dtype=np.uint32)
        assert tokenizer.encode_prompt(ids) is ids

    def test_a_model_without_a_template_says_what_to_do(self):
        with pytest.raises(InvalidRequest, match="send text or token ids"):
            Tokenizer(PLAIN).encode_chat(ChatPrompt((ChatMessage("user", "hi"),)))

    def test_a_broken_template_fails_chats_alone(self):
        tokenizer = Tokenizer(spec_of(HF, chat_template="{% for %}"))
        assert tokenizer.encode("hello").tolist() == ids_of("hello")
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="cannot be read"):
                tokenizer.render_chat(ChatPrompt((ChatMessage("user", "hi"),)))


class TestDecode:
    @pytest.mark.parametrize("text", ["", "hello world", "  two  spaces ", "été\n🦊", "<|end|"])
    def test_back_to_the_text(self, text):
        tokenizer = Tokenizer(PLAIN)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text

    def test_special_tokens_are_left_out_or_not(self):
        tokenizer = Tokenizer(PLAIN)
        tokens = tokenizer.encode("a<|end|>b")
        assert tokenizer.decode(tokens) == "ab"
        assert tokenizer.decode(tokens, skip_special_tokens=False) == "a<|end|>b"
        assert END in tokenizer.special_token_ids
        assert ids_of("a")[0] not in tokenizer.special_token_ids

    def test_ids_without_a_token_give_no_text(self):
        tokenizer = Tokenizer(PLAIN)
        assert tokenizer.decode([*ids_of("a"), 2**32 - 1, *ids_of("b")]) == "ab"


def others_share(work) -> float:
    """CPU time that this thread gets while `work` runs in another, for each second that `work` computes.

    Both want to run all the time. The system shares the CPUs out among them, few or many, busy or not: this is about 1,
    and about 0 where the other one keeps the interpreter's lock.
    """
    spent: list[float] = []

    def run() -> None:
        begun = time.thread_time()
        work()
        spent.append(time.thread_time() - begun)

    thread = threading.Thread(target=run)
    begun = time.thread_time()
    thread.start()
    while not spent:
        pass
    ours = time.thread_time() - begun
    thread.join()
    return ours / spent[0]


def test_tokenizing_does_not_stop_the_event_loop():
    """Behaviour 59: in a thread, it releases the interpreter's lock, which `tokenizers` does not do in every call."""
    tokenizer = Tokenizer(PLAIN, cache_bytes=0)
    text = "hello world and the quick brown fox " * 5_000
    hf = byte_level()
    ours = max(others_share(lambda: tokenizer.encode(text)) for _ in range(3))
    naive = min(others_share(lambda: hf.encode(text, add_special_tokens=False)) for _ in range(3))
    assert naive < 0.25 < ours


def test_many_threads_agree():
    tokenizer = Tokenizer(LLAMA, cache_bytes=20_000)
    texts = [f"<|start|>system {n % 7}<|end|>user {n % 13}<|end|>" for n in range(91)]
    expected = [ids_of(text) for text in texts]
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append([tokenizer.encode(text).tolist() for text in texts]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
