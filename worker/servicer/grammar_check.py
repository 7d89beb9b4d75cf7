"""Main of the process that tries grammars out, so that none which takes too long or crashes can harm the worker.

    python -m worker.servicer.grammar_check FRONT_PID TRY_S    one line of JSON in: a TokenizerSpec, then Grammars
                                                               one line of JSON out for each: "" when the tokenizer
                                                               is read, then why a grammar cannot be used, or ""

A grammar is compiled and followed through the beginning of some answer, on a thread with half of the stack that the
runner has, in bounded memory and TRY_S of CPU time. What needs more ends this process, not the runner: by SIGPROF, if
it is time.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from radixfleet.lifeline import die_with_parent
from radixfleet.text import TokenizerSpec
from radixfleet.types import Grammar
from worker.sampling.grammar import GrammarCompiler, GrammarError

_STACK_BYTES = 4 << 20
_MEMORY_BYTES = 512 << 20
_ANSWER_TOKENS = 64
_MOST_CHARACTERS = 500
"""llguidance repeats what it does not understand: more of a large grammar than the front's pipe or a status takes."""
_DEAD_END = "NoExtension"
"""In llguidance's words. A schema that refers to nothing but itself, say."""


def why_not(compiler: GrammarCompiler, grammar: Grammar) -> str:
    """Compile a grammar and follow it through a random answer; why it cannot be used, or ""."""
    try:
        matcher = compiler.fresh_matcher(grammar)
    except GrammarError as error:
        return str(error)
    random = np.random.default_rng(0)
    words = np.zeros(compiler.num_words, np.uint32)
    for _ in range(_ANSWER_TOKENS):
        matcher.fill(words, compiler.eos_token_ids)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.error or not len(allowed):
            break
        matcher.accept(int(random.choice(allowed)))
        if matcher.is_ended:
            break
    if _DEAD_END in matcher.error:
        return "no answer can keep to it: it leads to where nothing may follow"
    return matcher.error and f"it is too complex: {matcher.error}"


def main() -> None:
    """Answer until the front closes the pipe."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lines = sys.stdin.buffer
    spec = TokenizerSpec.from_json(lines.readline())
    try:
        compiler = GrammarCompiler(spec)
        unusable = ""
    except GrammarError as error:
        unusable = str(error)
    _limit_memory()
    _say("")  # ready
    threading.stack_size(_STACK_BYTES)
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
        grammar = msgspec.json.decode(line, type=Grammar)
        answer = unusable or _on_thread(partial(why_not, compiler, grammar))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answer if len(answer) <= _MOST_CHARACTERS else f"{answer[:_MOST_CHARACTERS]} ...")


def _say(answer: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _on_thread(work: Callable[[], str]) -> str:
    """What `work` returns, called on a thread of `_STACK_BYTES`."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


def _limit_memory() -> None:
    """What is there now, and some more."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
