"""The comparison with peers: prompts, turns, alternation, figures."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from deploy.bench.peers.clients import Answer, WrongAnswer
from deploy.bench.peers.comparison import LONG_TURN_S, OURS, Contestant, alternate, figures, warm_up
from deploy.bench.peers.questions import QUESTIONS, Questions, longest, words_of
from deploy.bench.peers.tables import contestants_table, workload_table
from deploy.bench.peers.turns import Turn, take
from radixfleet.types import TokenArray
from tests.support.tiny_model import tiny_model
from worker.model.errors import ModelError

WORDS = np.arange(1000, 2000, dtype=np.uint32)
FEW = Questions("few", 6, 3, 8, 4, 5)
ALONE = Questions("alone", 2, 1, 0, 4, 5)


class Echo:
    """Answers at once and correctly, and notes what happened in `events`."""

    def __init__(self, name: str, events: list[str], *, output_tokens: int | None = None, error: str = "") -> None:
        self.name = name
        self.events = events
        self.output_tokens = output_tokens
        self.error = error
        self.running = 0
        self.most_running = 0
        self.asked: list[TokenArray] = []
        self.frozen = True

    async def ask(self, prompt: TokenArray, new_tokens: int) -> Answer:
        assert not self.frozen, "it is asked while it is frozen"
        self.asked.append(prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if self.error:
            raise WrongAnswer(self.error)
        self.events.append(self.name)
        counted = new_tokens if self.output_tokens is None else self.output_tokens
        return Answer(0.25, 0.5, len(prompt), counted, f" word{prompt[-1]}")

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False

    def obituary(self, how: str) -> str:
        return f"{how}; the end of the log: {self.name} is sorry"


def contestant(server: Echo, *, once: bool = False) -> Contestant:
    return Contestant(server.name, f"{server.name} 1.0", "bfloat16", server, server, once=once)


def turn(duration_s: float, first_token_s: Sequence[float] = (0.5, 0.5), text: str = " the same words") -> Turn:
    return Turn(duration_s, [Answer(first_s, first_s + 1.0, 12, 11, text) for first_s in first_token_s])


class TestQuestions:
    """Prompts."""

    def test_the_workloads_are_the_published_ones(self) -> None:
        shared, unshared, alone = QUESTIONS
        assert (shared.num_requests, shared.concurrency, shared.new_tokens) == (32, 8, 64)
        assert (shared.prefix_tokens, shared.unique_tokens) == (512, 64)
        assert (unshared.prefix_tokens, unshared.prompt_tokens) == (0, shared.prompt_tokens)
        assert alone.concurrency == 1
        assert longest(QUESTIONS) == 640

    def test_a_prefix_is_shared_within_a_turn_and_with_no_other(self) -> None:
        prompts = [FEW.prompts(WORDS, seed) for seed in (0, 1)]
        assert all(len(prompt) == 12 for prompt in prompts[0])
        assert len({prompt[:8].tobytes() for prompt in prompts[0]}) == 1
        assert len({prompt[8:].tobytes() for prompt in prompts[0]}) == 6
        assert prompts[0][0][:8].tobytes() != prompts[1][0][:8].tobytes()
        assert np.array_equal(FEW.prompts(WORDS, 0)[3], prompts[0][3]), "a seed names a workload"

    def test_prompts_are_made_of_whole_words(self) -> None:
        tokenizer = Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))
        for word in words_of(tokenizer):
            assert re.fullmatch(r" [a-z]{3,}", tokenizer.decode([int(word)]))

    def test_a_vocabulary_without_words_is_refused(self) -> None:
        with pytest.raises(ModelError, match="too few words"):
            words_of(Tokenizer(models.BPE()))


class TestTurns:
    """One workload on one server."""

    async def test_no_more_at_once_than_asked_and_no_fewer(self) -> None:
        server = Echo("a", [])
        server.thaw()
        done = await take(server, FEW, FEW.prompts(WORDS, 0), 10.0)
        assert server.most_running == 3
        assert [answer.text for answer in done.answers] == [f" word{prompt[-1]}" for prompt in FEW.prompts(WORDS, 0)]
        assert done.tokens_per_s == pytest.approx(6 * 5 / done.duration_s)
        assert done.ttft_p50_s == 0.25
        assert done.inter_token_s == pytest.approx(0.25 / 4)

    async def test_an_answer_of_another_length_does_not_count(self) -> None:
        server = Echo("a", [], output_tokens=4)
        server.thaw()
        with pytest.raises(WrongAnswer, match=r"asked for 12 \+ 5 tokens, the server counted 12 \+ 4"):
            await take(server, FEW, FEW.prompts(WORDS, 0), 10.0)

    async def test_a_server_that_hangs_is_given_up(self) -> None:
        class Hangs(Echo):
            async def ask(self, prompt: TokenArray, new_tokens: int) -> Answer:
                await asyncio.Event().wait()
                raise AssertionError

        with pytest.raises(WrongAnswer, match="took longer than"):
            await take(Hangs("a", []), FEW, FEW.prompts(WORDS, 0), 0.05)


class TestAlternation:
    """Who is asked when."""

    async def test_everybody_gets_every_workload_in_turn_and_the_first_changes(self) -> None:
        events: list[str] = []
        servers = [Echo(name, events) for name in (OURS, "a", "b")]
        await alternate([contestant(each) for each in servers], (FEW, ALONE), WORDS, 2, lambda text: None)
        turns = [name for index, name in enumerate(events) if not index or events[index - 1] != name]
        assert turns == [OURS, "a", "b", "a", "b", OURS, "b", OURS, "a", OURS, "a", "b"]
        for server in servers[1:]:
            assert all(map(np.array_equal, server.asked, servers[0].asked)), "the same prompts in the same order"
            assert len(server.asked) == 2 * (6 + 2)
            assert server.frozen

    async def test_one_that_fails_is_out_with_its_log_and_the_others_go_on(self) -> None:
        events: list[str] = []
        ours, bad, good = Echo(OURS, events), Echo("bad", events, error="no room"), Echo("good", events)
        contestants = [contestant(each) for each in (ours, bad, good)]
        told: list[str] = []
        await alternate(contestants, (FEW,), WORDS, 2, told.append)
        assert contestants[1].failure == "few: no room; the end of the log: bad is sorry"
        assert len(bad.asked) == FEW.concurrency, "it is not asked again"
        assert len(good.asked) == 2 * 6
        assert [row.name for row in figures(contestants, FEW)] == [OURS, "good"]
        assert "bad failed" in told[-1] or any("bad failed" in text for text in told)

    async def test_the_run_fails_with_ours(self) -> None:
        contestants = [contestant(Echo(OURS, [], error="gone")), contestant(Echo("a", []))]
        with pytest.raises(WrongAnswer, match="gone"):
            await alternate(contestants, (FEW,), WORDS, 1, lambda text: None)

    async def test_slow_ones_and_those_beside_the_comparison_have_one_round(self) -> None:
        slow, beside, quick = (
            contestant(Echo(name, []), once=name == "beside") for name in ("slow", "beside", "quick")
        )
        for each in (slow, beside, quick):
            assert each.wants(FEW, 0)
        slow.turns[FEW.name] = {0: turn(LONG_TURN_S + 1)}
        quick.turns[FEW.name] = {0: turn(LONG_TURN_S - 1)}
        assert not slow.wants(FEW, 1)
        assert slow.wants(ALONE, 1), "only on the workload on which it is slow"
        assert not beside.wants(FEW, 1)
        assert quick.wants(FEW, 1)

    async def test_a_warm_up_leaves_no_figures(self) -> None:
        each = contestant(Echo("a", []))
        await warm_up(each, FEW, WORDS)
        assert not each.turns
        assert each.asks.asked[0].tobytes() != FEW.prompts(WORDS, 0)[0].tobytes()  # type: ignore[attr-defined]


class TestFigures:
    """Medians, and ratios within a round."""

    def test_a_ratio_is_to_ours_in_the_same_round(self) -> None:
        ours, peer = contestant(Echo(OURS, [])), contestant(Echo("a", []))
        ours.turns["few"] = {0: turn(1.0), 1: turn(2.0, (1.0, 1.0)), 2: turn(4.0, (2.0, 2.0))}
        peer.turns["few"] = {0: turn(2.0), 1: turn(4.0, (2.0, 2.0)), 2: turn(2.0, (8.0, 8.0), " others")}
        mine, theirs = figures([ours, peer], FEW)
        assert (mine.tokens_ratio, mine.ttft_ratio, mine.agreement) == (1.0, 1.0, 1.0)
        assert theirs.tokens_per_s == pytest.approx(22 / 2.0)
        assert theirs.tokens_ratio == pytest.approx(0.5), "of 0.5, 0.5 and 2: not that of the medians"
        assert theirs.ttft_p50_ms == pytest.approx(2000.0)
        assert theirs.ttft_ratio == pytest.approx(2.0)
        assert theirs.inter_token_ms == pytest.approx(100.0)
        assert theirs.rounds == 3

    def test_a_single_round_is_set_against_ours_of_that_round(self) -> None:
        ours, peer = contestant(Echo(OURS, [])), contestant(Echo("a", []))
        ours.turns["few"] = {0: turn(1.0), 1: turn(2.0), 2: turn(2.0)}
        peer.turns["few"] = {0: turn(4.0)}
        assert figures([ours, peer], FEW)[1].tokens_ratio == pytest.approx(0.25)

    def test_six_rounds_say_how_sure_the_ratios_are(self) -> None:
        ours, peer = contestant(Echo(OURS, [])), contestant(Echo("a", []))
        ours.turns["few"] = {index: turn(1.0) for index in range(6)}
        peer.turns["few"] = {index: turn(duration_s) for index, duration_s in enumerate((1, 1.25, 2, 2, 4, 5))}
        mine, theirs = figures([ours, peer], FEW)
        assert theirs.tokens_interval == pytest.approx((0.2, 1.0))
        console = Console(width=140)
        with console.capture() as printed:
            console.print(workload_table(FEW, [mine, theirs]))
        assert "0.50 (0.20 to 1.00)" in printed.get()
        assert "1.00 (" not in printed.get().splitlines()[2], "ours has no spread to tell"
        peer.turns["few"].pop(5)
        assert figures([ours, peer], FEW)[1].tokens_interval is None

    def test_agreement_looks_at_how_answers_begin(self) -> None:
        one, two = turn(1.0, text=" the worker keeps it"), turn(1.0, text=" the worker lost it")
        other = Turn(1.0, [two.answers[0], Answer(0.5, 1.5, 12, 11, " a router")])
        assert other.agreement(one) == 0.5

    def test_the_tables_name_engines_versions_and_weights(self) -> None:
        ours, peer = contestant(Echo(OURS, [])), contestant(Echo("a", []))
        ours.turns["few"], peer.turns["few"] = {0: turn(1.0)}, {0: turn(2.0)}
        console = Console(width=120)
        with console.capture() as printed:
            console.print(contestants_table([ours, peer]))
            console.print(workload_table(FEW, figures([ours, peer], FEW)))
        for text in ("a 1.0", "bfloat16", "6 requests, 3 at a time", "0.50", "100%"):
            assert text in printed.get()
