from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import SPECIAL_TOKENS, tiny_model
from worker.model.errors import BrokenModel, UnsupportedModel
from worker.model.gguf_file import GgufFile
from worker.model.gguf_tokenizer import PRE_TOKENIZERS, adds_bos, tokenizer_from_gguf


def pieces(name: str, text: str) -> list[str]:
    """The parts that a pre-tokenizer cuts a text into, as text."""
    return [text[start:end] for _, (start, end) in PRE_TOKENIZERS[name].make().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "in 1234 days", ["in", " ", "1", "2", "3", "4", " days"]),
        ("smollm", "x12½ a² b", ["x", "1", "2", "½", " a", "²", " b"]),
        ("smollm", "it's  ok\n\n now", ["it", "'s", " ", " ok", "\n\n", " now"]),
        ("gpt-2", "in 1234 days", ["in", " 1234", " days"]),
        ("gpt-2", "a½ b²", ["a", "½", " b", "²"]),
        ("llama-bpe", "in 1234567 days", ["in", " ", "123", "456", "7", " days"]),
        ("llama-bpe", "IT'S (ok)\r\n now", ["IT", "'S", " (", "ok", ")\r\n", " now"]),
        ("llama-bpe", "x½²³¼1", ["x", "½²³", "¼1"]),
        ("qwen2", "in 1234 days", ["in", " ", "1", "2", "3", "4", " days"]),
        ("qwen2", "x½²", ["x", "½", "²"]),
        ("qwen2", "a.b\n c", ["a", ".b", "\n", " c"]),
    ],
)
def test_text_is_cut_as_each_family_cuts_it(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@pytest.mark.parametrize(
    "text", ["", " ", "1234", "½ and ²", "naïve façade 東京\n\n\t x", "a  b   c", "I'll can't", "🙂👍🏽"]
)
def test_cutting_loses_nothing(name: str, text: str) -> None:
    assert "".join(pieces(name, text)) == text


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_model(), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def changed(file: Path, **metadata: Any) -> GgufFile:
    opened = GgufFile(file)
    opened.metadata |= {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return opened


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_text_comes_back(file: Path, pre: str) -> None:
    tokenizer = tokenizer_from_gguf(changed(file, pre=pre))
    for text in ("the worker keeps 1234 prefixes", "½ pound, x², naïve 東京 🙂", " two  spaces\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_unicode_is_composed_where_the_family_does_it(file: Path) -> None:
    decomposed = "e\u0301"
    qwen = tokenizer_from_gguf(changed(file, pre="qwen2"))
    assert qwen.decode(qwen.encode(decomposed).ids) == "\u00e9"
    llama = tokenizer_from_gguf(changed(file, pre="llama-bpe"))
    assert llama.decode(llama.encode(decomposed).ids) == decomposed


def test_whole_tokens_win_over_merges_where_the_family_says_so(file: Path) -> None:
    vocabulary = {"tokens": ["a", "b", "c", "ab", "abc"], "merges": ["a b"], "token_type": [1] * 5}
    assert tokenizer_from_gguf(changed(file, pre="llama-bpe", **vocabulary)).encode("abc").ids == [4]
    assert tokenizer_from_gguf(changed(file, pre="gpt-2", **vocabulary)).encode("abc").ids == [3, 2]


def test_control_tokens_are_recognised_and_skipped_and_user_defined_ones_only_recognised(file: Path) -> None:
    tokens = [*SPECIAL_TOKENS, "<note>", "a", "b"]
    tokenizer = tokenizer_from_gguf(changed(file, tokens=tokens, merges=[], token_type=[3, 3, 3, 4, 1, 1]))
    ids = tokenizer.encode("a<|im_end|>b<note>a").ids
    assert ids == [4, 2, 5, 3, 4]
    assert tokenizer.decode(ids) == "ab<note>a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b<note>a"


def test_the_file_says_whether_bos_is_added_and_else_the_family_does(file: Path) -> None:
    assert adds_bos(changed(file, pre="llama-bpe", add_bos_token=True))
    assert not adds_bos(changed(file, pre="llama-bpe", add_bos_token=False))
    for pre, expected in (("llama-bpe", True), ("qwen2", False), ("smollm", False)):
        opened = changed(file, pre=pre)
        del opened.metadata["tokenizer.ggml.add_bos_token"]
        assert adds_bos(opened) == expected


def test_other_kinds_are_refused_with_the_way_out(file: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"of type 'llama' .* use the Hugging Face directory"):
        tokenizer_from_gguf(changed(file, model="llama"))
    with pytest.raises(UnsupportedModel, match=r"'tekken' is unknown .*known: default, gpt-2, llama-bpe"):
        tokenizer_from_gguf(changed(file, pre="tekken"))


def test_a_vocabulary_that_lacks_a_merged_token_is_broken(file: Path) -> None:
    with pytest.raises(BrokenModel, match="do not fit together"):
        tokenizer_from_gguf(changed(file, tokens=["a", "b"], merges=["a b"], token_type=[1, 1]))
    opened = GgufFile(file)
    del opened.metadata["tokenizer.ggml.merges"]
    with pytest.raises(BrokenModel, match=r"lacks the metadata 'tokenizer\.ggml\.merges'"):
        tokenizer_from_gguf(opened)
