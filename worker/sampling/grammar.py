"""Which tokens a grammar allows next, by llguidance (Moskal et al.): compiled once, then a matcher for each answer.

    Grammar -> compile (milliseconds to seconds; the interpreter's lock is free meanwhile) -> a matcher at its beginning
    matcher.accept(token)        the answer goes on
    matcher.fill(words)          one bit for each token of the vocabulary: allowed next

Compiling and matching a client's grammar costs what the client makes it cost, so both have limits: a grammar beyond
them is refused, and an answer that runs into them fails alone. They do not bound every compilation in time or stack,
which is why `worker.servicer.grammar_check` tries each grammar in a process that can be killed before one comes here.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from radixfleet.text import TokenizerSpec
from radixfleet.types import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Words: TypeAlias = npt.NDArray[np.uint32]
"""32 tokens each, the lowest bit first."""

_WORD_BITS = 32
_KEPT_GRAMMARS = 64
_KEPT_SOURCE_BYTES = 1 << 20
_JSON_OPTIONS: JsonCompileOptions = {
    # As much white space as people and programs put between tokens, but not endless: small models can get lost in it.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",
}


class GrammarError(ValueError):
    """A grammar cannot be used; the message, one sentence for the client, says why."""


def _limits() -> LLParserLimits:
    """About 20 ms of work for a token at most, and 20 MB of memory for an answer (by llguidance's own figures)."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=150_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class GrammarCompiler:
    """Compiles for one vocabulary and keeps what was compiled last. Thread-safe."""

    def __init__(self, spec: TokenizerSpec) -> None:
        """Takes about a second for 100,000 tokens and holds the interpreter's lock meanwhile.

        Raises GrammarError when llguidance cannot read the tokenizer.
        """
        self.eos_token_ids = spec.eos_token_ids
        self.num_words = num_words(spec.vocab_size)
        try:
            self._tokenizer = LLTokenizer(spec.tokenizer_json, spec.vocab_size, list(spec.eos_token_ids))
        except ValueError as error:
            why = _sentence(error)
            raise GrammarError(f"this model's tokenizer does not go together with grammars: {why}") from error
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()
        """Or why not; the last used last."""

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new one, at the beginning of an answer. Raises GrammarError."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            try:
                compiled = self._compile(grammar)
            except GrammarError as error:
                compiled = str(error)
        with self._lock:
            self._keep(grammar, compiled)
        if isinstance(compiled, str):
            raise GrammarError(compiled)
        return Matcher(compiled.deep_copy(), self.eos_token_ids)

    def fresh_matcher(self, grammar: Grammar) -> Matcher:
        """The same, but nothing is kept, and nothing that was is used."""
        return Matcher(self._compile(grammar), self.eos_token_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_sentence(matcher.get_error()))
        return matcher

    def _keep(self, grammar: Grammar, compiled: LLMatcher | str) -> None:
        self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        num_bytes = sum(len(kept.source) for kept in self._compiled)
        while len(self._compiled) > 1 and (len(self._compiled) > _KEPT_GRAMMARS or num_bytes > _KEPT_SOURCE_BYTES):
            oldest, _ = self._compiled.popitem(last=False)
            num_bytes -= len(oldest.source)


class Matcher:
    """Where one answer stands in its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    @property
    def is_ended(self) -> bool:
        """Nothing may follow: the answer is whole, or `error` says what went wrong."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why it is of no use any more, one line; empty while all is well."""
        return _sentence(self._matcher.get_error()) if self._matcher.is_error() else ""

    def accept(self, *token_ids: int) -> None:
        """The answer goes on with these. A token that was not allowed is an error."""
        self._matcher.consume_tokens(list(token_ids))

    def fill(self, words: Words, forbidden: tuple[int, ...]) -> None:
        """Set the bits of the tokens allowed next: those that the grammar allows, without `forbidden`.

        Where the grammar allows nothing but those, they stay: an answer must be able to end. The interpreter's lock is
        free while this computes, mostly for tens of microseconds. Not after the end.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        wanted = words.copy()
        for token_id in forbidden:
            wanted[token_id // _WORD_BITS] &= ~np.uint32(1 << token_id % _WORD_BITS)
        if wanted.any():
            words[:] = wanted


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // _WORD_BITS)


def _source(grammar: Grammar) -> str:
    """In llguidance's own notation. Raises GrammarError for what is not a JSON object."""
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(grammar.source)
    schema = '{"type": "object"}' if grammar.kind is GrammarKind.JSON_OBJECT else grammar.source
    try:
        # llguidance would find the same errors, but at places in its own notation.
        is_object = isinstance(json.loads(schema), dict)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from error
    if not is_object:
        raise GrammarError("a JSON Schema must be an object")
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)
    except ValueError as error:
        raise GrammarError(_sentence(error)) from error


def _sentence(error: object) -> str:
    """What a message of llguidance says, without the drawing below it. The errors of regular expressions come last."""
    lines = [line.strip() for line in str(error).splitlines()]
    first = next((line for line in lines if line), "no reason was given")
    last = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    return f"{first.rstrip(':')}: {last}" if last else first
