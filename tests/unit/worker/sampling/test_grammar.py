import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from radixfleet.text import Tokenizer, TokenizerSpec
from radixfleet.types import Grammar, GrammarKind
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_model
from worker.model.tokenizer_files import load_tokenizer_spec
from worker.sampling.grammar import GrammarCompiler, GrammarError, Matcher, num_words

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def spec() -> TokenizerSpec:
    return load_tokenizer_spec(tiny_model())


@pytest.fixture(scope="module")
def tokenizer(spec: TokenizerSpec) -> Tokenizer:
    return Tokenizer(spec)


@pytest.fixture(scope="module")
def compiler(spec: TokenizerSpec) -> GrammarCompiler:
    return GrammarCompiler(spec)


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def allowed(matcher: Matcher, forbidden: tuple[int, ...] = ()) -> set[int]:
    words = np.zeros(num_words(512), np.uint32)
    matcher.fill(words, forbidden)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def follows(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether each token of the text is allowed in its place."""
    for token_id in tokenizer.encode(text).tolist():
        if matcher.is_ended or token_id not in allowed(matcher):
            return False
        matcher.accept(token_id)
        assert not matcher.error
    return True


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (regex("[0-9]{3}-[a-z]+"), "123-hello", "12-hello"),
        (schema(PERSON), '{"name": "Ada Lovelace, née Byron", "age": 36}', '{"name": 36}'),
        (schema({"enum": ["red", "green"]}), '"green"', '"blue"'),
        (Grammar(GrammarKind.JSON_OBJECT, ""), '{"a": [1, {"b": null}]}', "[1]"),
        (Grammar(GrammarKind.LARK, 'start: "yes" | "no" tail\ntail: / [a-z]+/'), "no thanks", "maybe"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_texts_are_told_apart(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, good: str, bad: str
) -> None:
    assert follows(compiler.matcher(grammar), tokenizer, good)
    assert not follows(compiler.matcher(grammar), tokenizer, bad)


def test_the_end_is_known_without_an_end_token(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(schema(PERSON))
    assert follows(matcher, tokenizer, '{"name":"","age":1')
    assert not matcher.is_ended
    assert follows(matcher, tokenizer, "}")
    assert matcher.is_ended
    assert matcher.error == ""


def test_where_the_answer_may_end_or_go_on_the_end_token_ends_it(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(regex("a*"))
    assert EOS_TOKEN_ID in allowed(matcher)
    matcher.accept(EOS_TOKEN_ID)
    assert matcher.is_ended
    assert matcher.error == ""


def test_forbidden_tokens_are_taken_out_unless_nothing_else_is_left(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Behaviour 33: min_new_tokens and ignore_eos mask every end token, but an answer must be able to go on."""
    a = int(tokenizer.encode("a")[0])
    matcher = compiler.matcher(regex("a{0,2}"))
    assert EOS_TOKEN_ID not in allowed(matcher, (EOS_TOKEN_ID,))
    assert a in allowed(matcher, (EOS_TOKEN_ID,))
    assert allowed(compiler.matcher(regex("a")), (a,)) == {a}


def test_the_last_token_of_a_word_and_of_the_vocabulary_can_be_forbidden(compiler: GrammarCompiler) -> None:
    everything = regex("(.|\n)*")
    before = allowed(compiler.matcher(everything))
    last_of_a_word = next(token_id for token_id in before if token_id % 32 == 31)
    assert 511 in before
    taken = {last_of_a_word, 510, 511}
    assert allowed(compiler.matcher(everything), tuple(taken)) == before - taken


def test_matchers_of_one_grammar_do_not_share_their_place(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first, second = compiler.matcher(regex("abc")), compiler.matcher(regex("abc"))
    assert follows(first, tokenizer, "ab")
    assert follows(second, tokenizer, "abc")
    assert follows(first, tokenizer, "c")


def test_a_token_that_was_not_allowed_is_an_error_and_stays_one(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher(regex("abc"))
    matcher.accept(int(tokenizer.encode("x")[0]))
    assert "doesn't satisfy the grammar" in matcher.error
    assert "\n" not in matcher.error
    assert matcher.is_ended


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("a("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (schema({"type": "objct"}), "Invalid type: objct"),
        (schema({"not": {}}), "Unimplemented keys"),
        (schema({"type": "integer", "minimum": 3, "maximum": 1}), "Unsatisfiable"),
        (schema({"$ref": "http://example.com/schema"}), "not fetch"),
        (schema([1]), "must be an object"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":'), "not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 50_000), "nested too deeply"),
        (Grammar(GrammarKind.LARK, "start: other"), 'unknown name: "other"'),
        (Grammar(GrammarKind.LARK, 'begin: "a"'), "no start rule"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(compiler: GrammarCompiler, grammar: Grammar, why: str) -> None:
    for _ in range(2):  # the second time from what was kept
        with pytest.raises(GrammarError, match=why.replace("(", r"\(")) as caught:
            compiler.matcher(grammar)
        assert "\n" not in str(caught.value)


def test_white_space_in_json_is_allowed_but_not_endless(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(schema(PERSON))
    assert follows(matcher, tokenizer, "{\n    ")
    newline = int(tokenizer.encode("\n")[0])
    for _ in range(64):
        if newline not in allowed(matcher):
            break
        matcher.accept(newline)
    assert newline not in allowed(matcher)


def test_only_the_last_used_are_kept(spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(spec)
    compiled = []
    compile_one = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda grammar: compiled.append(grammar.source) or compile_one(grammar))
    sources = [f"a{{{number}}}" for number in range(1, 71)]
    for source in sources:
        compiler.matcher(regex(source))
    compiler.matcher(regex(sources[-64]))
    compiler.matcher(regex(sources[0]))
    assert compiled == [*sources, sources[0]]


def test_large_grammars_are_kept_in_small_numbers(spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(spec)
    compiled = []
    compile_one = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda grammar: compiled.append(grammar.source) or compile_one(grammar))
    sources = [f"a|{letter * 200_000}" for letter in "bcdefg"]
    for source in sources:
        compiler.matcher(Grammar(GrammarKind.LARK, f"start: /a/\n// {source}"))
    compiler.matcher(Grammar(GrammarKind.LARK, f"start: /a/\n// {sources[-1]}"))
    assert len(compiled) == 6
    compiler.matcher(Grammar(GrammarKind.LARK, f"start: /a/\n// {sources[0]}"))
    assert len(compiled) == 7


def test_threads_may_compile_at_once(compiler: GrammarCompiler) -> None:
    grammars = [regex(f"[a-f]{{{number}}}x") for number in range(1, 9)]
    ended: list[bool] = []

    def work(offset: int) -> None:
        for grammar in grammars[offset:] + grammars[:offset]:
            ended.append(compiler.matcher(grammar).is_ended)  # noqa: PERF401

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [False] * 32


def test_a_tokenizer_that_does_not_fit_is_told_at_once(spec: TokenizerSpec) -> None:
    with pytest.raises(GrammarError, match="does not go together with grammars: vocab size too small"):
        GrammarCompiler(replace(spec, vocab_size=100))
