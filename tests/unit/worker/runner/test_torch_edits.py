"""Penalties, bias, log probabilities and grammars as the torch runner computes them, against transformers.

Relayed steps are those of an overlapped engine: no plan knows the token before it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from radixfleet.types import Grammar, GrammarKind
from tests.support.grammars import PERSON, regex, schema, tiny_tokenizer
from tests.support.runner_driver import RunnerDriver
from tests.support.slow_sampling import log_softmax, penalized
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_model
from worker.core.logits import LogitEdits
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

PROMPT = np.random.default_rng(1).integers(3, 490, 40).tolist()
OTHER = np.random.default_rng(2).integers(3, 490, 23).tolist()


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    config = TorchRunnerConfig(
        model_path=str(tiny_model()),
        dtype="float32",
        device_memory_bytes=64 << 20,
        max_total_tokens=65_536,
        max_running_requests=6,
        chunked_prefill_size=64,
        max_context_tokens=512,
    )
    runner = TorchRunner(config)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def driver(runner: TorchRunner) -> RunnerDriver:
    """One for all tests: rows go from test to test, as they go from request to request."""
    return RunnerDriver(runner)


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Float64 [tokens, vocab]."""
    return model(torch.tensor([list(tokens)])).logits[0].double().numpy()


def begin(driver: RunnerDriver, row: int, prompt: Sequence[int], answer: Sequence[int] = (), **values: object) -> None:
    """A request on a row; with an `answer`, as it comes back after a retraction."""
    history = np.array([*prompt, *answer], np.int32)
    driver.begin(row, [*prompt, *answer], prompt_tokens=len(prompt), history=history, **values)


EDITS = [
    LogitEdits(frequency_penalty=1.5),
    LogitEdits(presence_penalty=2.0),
    LogitEdits(repetition_penalty=1.8),
    LogitEdits(frequency_penalty=-0.5, presence_penalty=0.7, repetition_penalty=1.3),
    LogitEdits(repetition_penalty=0.7),
    LogitEdits(bias=((77, 6.0), (5, -100.0)), frequency_penalty=2.0),
]


@pytest.mark.parametrize("edits", EDITS, ids=str)
def test_greedy_tokens_are_those_of_edited_reference_logits(
    driver: RunnerDriver, reference: PreTrainedModel, edits: LogitEdits
) -> None:
    """Behaviour 32: every penalty counts the token of the step before, which no plan knew."""
    prompt = PROMPT + PROMPT[:10]
    begin(driver, 1, prompt, edits=edits)
    driver.prefill(1, 16)
    driver.decode([1], 29)
    answer: list[int] = []
    for token in driver.rows[1].tokens:
        logits = penalized(
            logits_of(reference, [*prompt, *answer])[-1],
            prompt,
            answer,
            repetition=edits.repetition_penalty,
            frequency=edits.frequency_penalty,
            presence=edits.presence_penalty,
        )
        for token_id, value in edits.bias:
            logits[token_id] += value
        assert logits[token] == pytest.approx(logits.max(), abs=1e-3)
        answer.append(token)


def test_edits_do_change_the_tokens(driver: RunnerDriver) -> None:
    """So that the tests around can fail."""
    free = driver.generate(0, PROMPT, 30)
    for edits in EDITS:
        begin(driver, 0, PROMPT, edits=edits)
        driver.prefill(0)
        driver.decode([0], 29)
        assert driver.rows[0].tokens != free, edits


def test_edited_rows_and_plain_ones_do_not_mix(driver: RunnerDriver) -> None:
    """All kinds in one batch, in another order of rows; each gives what it gives alone."""
    kinds: list[dict[str, object]] = [{"edits": edits} for edits in EDITS[:4]]
    kinds += [{}, {"logprobs": 3, "temperature": 0.9, "seed": 5}]
    alone = []
    for values in kinds:
        begin(driver, 0, PROMPT, **values)
        driver.prefill(0)
        driver.decode([0], 11)
        alone.append(driver.rows[0].tokens)
    for row, values in enumerate(kinds):
        begin(driver, row, PROMPT, **values)
    driver.check(driver.step({3: 40, 0: 24}))
    driver.check(driver.step({5: 40, 3: 0, 0: 16, 2: 7}))
    for row in (1, 2, 4):
        driver.prefill(row)
    while unfinished := {row: 0 for row in (4, 2, 0, 5, 1, 3) if len(driver.rows[row].tokens) < 12}:
        driver.check(driver.step(unfinished))
    assert [driver.rows[row].tokens for row in range(6)] == alone


@pytest.mark.parametrize("edits", [EDITS[3], LogitEdits(grammar=regex("[a-z ]{40,60}"))], ids=["penalties", "grammar"])
@pytest.mark.parametrize("kept", [1, 7, 19])
def test_a_retracted_request_goes_on_as_if_nothing_had_happened(
    driver: RunnerDriver, edits: LogitEdits, kept: int
) -> None:
    """Behaviours 23 and 32: counts and matcher are made again from the tokens that there were."""
    begin(driver, 0, PROMPT, edits=edits)
    driver.prefill(0)
    driver.decode([0], 19)
    whole = driver.rows[0].tokens
    begin(driver, 3, PROMPT, whole[:kept], edits=edits)
    driver.prefill(3, 32)
    driver.decode([3], 19 - kept)
    assert driver.rows[3].tokens == whole[kept:]


def test_a_row_keeps_nothing_of_an_edited_request(driver: RunnerDriver) -> None:
    free = driver.generate(0, OTHER, 8)
    begin(
        driver, 1, PROMPT, edits=LogitEdits(frequency_penalty=2.0, bias=((9, 50.0),), grammar=regex("x+")), logprobs=2
    )
    driver.prefill(1)
    assert driver.generate(1, OTHER, 8) == free
    assert driver.rows[1].told == {}
    begin(driver, 1, PROMPT, edits=LogitEdits(frequency_penalty=2.0, bias=((9, 50.0),)))
    driver.prefill(1)
    driver.end(1)
    driver.begin(1, OTHER)
    driver.prefill(1)
    driver.decode([1], 7)
    assert driver.rows[1].tokens == free


def check_told(driver: RunnerDriver, row: int, reference: PreTrainedModel, k: int, first: int, last: int) -> None:
    """The log probabilities of positions [first, last] are the reference's."""
    state = driver.rows[row]
    tokens = [*state.prompt, *state.tokens]
    logits = logits_of(reference, tokens)
    assert sorted(state.told) == list(range(first, last + 1))
    for position, (logprob, top_ids, top_logprobs) in state.told.items():
        slow = log_softmax(logits[position - 1])
        assert logprob == pytest.approx(slow[tokens[position]], abs=2e-4)
        assert len(top_ids) >= k
        np.testing.assert_allclose(top_logprobs, np.sort(slow)[::-1][: len(top_ids)], atol=2e-4)
        np.testing.assert_allclose(slow[top_ids], top_logprobs, atol=2e-4)


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("values", [{}, {"temperature": 1.5, "top_k": 3, "seed": 3}], ids=["greedy", "drawn"])
def test_log_probabilities_of_new_tokens_are_the_models_own(
    driver: RunnerDriver, reference: PreTrainedModel, k: int, values: dict[str, float]
) -> None:
    """They are those of the raw logits, whatever temperature, filters, penalties and bias made of them."""
    edits = LogitEdits(presence_penalty=1.0, bias=((3, 5.0),))
    begin(driver, 0, PROMPT, logprobs=k, edits=edits, **values)
    driver.prefill(0, 16)
    driver.decode([0], 11)
    check_told(driver, 0, reference, k, 40, 51)


@pytest.mark.parametrize("chunk", [1, 3, 16, 39, 40])
def test_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(
    driver: RunnerDriver, reference: PreTrainedModel, chunk: int
) -> None:
    begin(driver, 2, PROMPT, prompt_logprobs=4)
    driver.prefill(2, chunk)
    driver.decode([2], 3)
    check_told(driver, 2, reference, 4, 1, 39)


def test_log_probabilities_in_a_mixed_batch_after_a_cached_prefix(
    driver: RunnerDriver, reference: PreTrainedModel
) -> None:
    """One row tells of its prompt and its answer, one of its answer, one of the rest of its prompt, one of nothing."""
    driver.generate(0, PROMPT, 1)
    begin(driver, 1, PROMPT, prompt_logprobs=2, logprobs=5)
    begin(driver, 2, OTHER, logprobs=0)
    driver.begin(3, PROMPT, driver.rows[0].slots[:16], prompt_logprobs=1, history=np.array(PROMPT, np.int32))
    driver.begin(4, OTHER)
    driver.check(driver.step({4: 23, 1: 30, 2: 11}))
    driver.check(driver.step({2: 12, 3: 20, 4: 0, 1: 10}))
    driver.prefill(3)
    driver.decode([3, 2, 1, 4], 4)
    check_told(driver, 1, reference, 2, 1, 44)
    check_told(driver, 2, reference, 0, 23, 27)
    check_told(driver, 3, reference, 1, 17, 39)
    assert driver.rows[4].told == {}


def text_of(driver: RunnerDriver, row: int) -> str:
    return tiny_tokenizer().decode(driver.rows[row].tokens)


def run_out(driver: RunnerDriver, rows: Sequence[int], limit: int = 120) -> None:
    """Decode until every answer has ended by its grammar."""
    for _ in range(limit):
        going = [row for row in rows if not driver.rows[row].has_ended]
        if not going:
            return
        driver.decode(going, 1)
    raise AssertionError(f"not at an end: {[text_of(driver, row) for row in rows]}")


@pytest.mark.parametrize("values", [{}, {"temperature": 1.5, "seed": 11}], ids=["greedy", "drawn"])
def test_answers_keep_to_their_grammars(driver: RunnerDriver, values: dict[str, float]) -> None:
    """Each row to its own, in one batch, beside a row without; the end is told with the last token."""
    free = driver.generate(5, OTHER, 10)
    begin(driver, 0, PROMPT, edits=LogitEdits(grammar=schema(PERSON)), **values)
    begin(driver, 1, OTHER, edits=LogitEdits(grammar=regex("[0-9]{3}-[a-z]{2,5}!")), **values)
    begin(driver, 2, OTHER, edits=LogitEdits(grammar=Grammar(GrammarKind.LARK, 'start: ("a" | "bc"){3}')), **values)
    driver.begin(5, OTHER)
    for row in (0, 1, 2, 5):
        driver.prefill(row, 16)
    driver.decode([5, 2, 1, 0], 1)
    run_out(driver, [0, 1, 2])
    person = json.loads(text_of(driver, 0))
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)
    assert re.fullmatch("[0-9]{3}-[a-z]{2,5}!", text_of(driver, 1))
    assert re.fullmatch("(a|bc){3}", text_of(driver, 2))
    driver.decode([5], 8)
    assert driver.rows[5].tokens == free


def test_a_step_after_the_end_of_a_grammar_is_harmless(driver: RunnerDriver) -> None:
    """Behaviour 4: overlapped, one more step is in flight when the end is told."""
    begin(driver, 0, PROMPT, edits=LogitEdits(grammar=regex("ab")))
    driver.prefill(0)
    run_out(driver, [0])
    driver.decode([0], 3)
    assert driver.rows[0].cause == ""


@pytest.mark.parametrize("stops", [(EOS_TOKEN_ID,), ()], ids=["eos", "ignore_eos"])
def test_an_end_token_ends_what_could_go_on_unless_it_must_not(driver: RunnerDriver, stops: tuple[int, ...]) -> None:
    """Behaviour 33: below min_new_tokens, and with ignore_eos, no end token comes where the grammar can go on."""
    bias = ((EOS_TOKEN_ID, 100.0),)
    edits = LogitEdits(grammar=regex("a{1,30}"), bias=bias)
    begin(driver, 0, PROMPT, edits=edits, stop_token_ids=stops, min_new_tokens=4)
    driver.prefill(0)
    for _ in range(29):
        if driver.rows[0].has_ended:
            break
        driver.decode([0], 1)
    tokens = driver.rows[0].tokens
    if stops:
        assert tokens.index(EOS_TOKEN_ID) == 4
    else:
        assert EOS_TOKEN_ID not in tokens
        assert text_of(driver, 0) == "a" * 30
    assert driver.rows[0].has_ended


def test_the_end_of_a_grammar_comes_before_min_new_tokens(driver: RunnerDriver) -> None:
    """Behaviour 33: nothing else is allowed then, so the answer is over."""
    begin(driver, 0, PROMPT, edits=LogitEdits(grammar=regex("ab")), stop_token_ids=(EOS_TOKEN_ID,), min_new_tokens=50)
    driver.prefill(0)
    run_out(driver, [0])
    assert text_of(driver, 0) == "ab"


def test_penalties_and_bias_act_within_the_grammar(driver: RunnerDriver) -> None:
    tokens = tiny_tokenizer().encode("abc").tolist()
    bias = tuple((token_id, 30.0) for token_id in sorted(set(tokens[:1])))
    begin(driver, 0, PROMPT, edits=LogitEdits(grammar=regex("[abc]{12}"), bias=bias, frequency_penalty=2.0))
    driver.prefill(0)
    run_out(driver, [0])
    answer = text_of(driver, 0)
    assert len(answer) == 12
    assert set(answer) <= set("abc")


def test_a_grammar_that_cannot_be_used_fails_its_row_alone(driver: RunnerDriver) -> None:
    free = driver.generate(1, OTHER, 3)
    begin(driver, 0, PROMPT, edits=LogitEdits(grammar=regex("a(")))
    driver.begin(1, OTHER)
    result = driver.step({0: 40, 1: 23})
    assert result.failed.tolist() == [True, False]
    assert "unclosed group" in driver.rows[0].cause
    driver.decode([1], 2)
    assert driver.rows[1].tokens == free


def test_a_grammar_that_runs_into_a_limit_fails_its_row_alone(driver: RunnerDriver) -> None:
    free = driver.generate(1, OTHER, 6)
    ambiguous = Grammar(GrammarKind.LARK, 'start: r0{1000}\nr0: r1{1000}\nr1: r2{1000}\nr2: "x"')
    begin(driver, 0, PROMPT, edits=LogitEdits(grammar=ambiguous))
    driver.begin(1, OTHER)
    failed = [driver.step({0: 40, 1: 23}).failed.tolist()]
    failed += [driver.step({0: 0, 1: 0}).failed.tolist() for _ in range(5)]
    assert any(row for row, _ in failed)
    assert not any(other for _, other in failed)
    assert "too complex" in driver.rows[0].cause
    assert driver.rows[1].tokens == free


def test_grammars_are_prepared_and_refused(runner: TorchRunner, driver: RunnerDriver) -> None:
    assert runner.prepare(schema(PERSON)) == ""
    assert "unclosed group" in runner.prepare(regex("a("))


def test_draws_within_a_grammar_follow_the_distribution(driver: RunnerDriver, reference: PreTrainedModel) -> None:
    """Behaviour 31: chi-square over the tokens that the grammar allows, renormalized."""
    num_draws, rows = 1500, 6
    grammar = regex("[a-h]")
    letters = [int(tiny_tokenizer().encode(letter)[0]) for letter in "abcdefgh"]
    counts: dict[int, int] = dict.fromkeys(letters, 0)
    slots: list[int] = []
    for first in range(0, num_draws, rows):
        for row in range(rows):
            values = {"temperature": 2.0, "seed": first + row, "edits": LogitEdits(grammar=grammar)}
            history = np.array(OTHER, np.int32)
            driver.begin(row, OTHER, slots[:-1], prompt_tokens=len(OTHER), history=history, **values)
        driver.check(driver.step({row: len(OTHER) - max(len(slots) - 1, 0) for row in range(rows)}))
        slots = slots or driver.rows[0].slots
        for row in range(rows):
            counts[driver.rows[row].tokens[0]] += 1
    logits = logits_of(reference, OTHER)[-1][letters] / 2.0
    expected = np.exp(log_softmax(logits)) * num_draws
    seen = np.array([counts[letter] for letter in letters])
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(letters) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5
