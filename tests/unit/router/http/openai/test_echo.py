"""Where tokens stand in the text of an answer, and of the prompt that it may begin with."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers import decoders, models, pre_tokenizers

from radixfleet.text import Tokenizer
from radixfleet.v1 import inference_pb2
from router.api.preparing import ServedModel
from router.http.openai.answers import CompletionChoices
from tests.support.replies import model, prepared
from tests.support.small_tokenizers import spec_of

BOS, THE, QUICK, FOX = range(4)


def of_words() -> Tokenizer:
    """As SentencePiece has it: a word holds the space before it, which the first one of a text loses."""
    plain = PlainTokenizer(models.WordLevel({"<s>": BOS, "▁the": THE, "▁quick": QUICK, "▁fox": FOX}, unk_token="<s>"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    plain.decoder = decoders.Metaspace(prepend_scheme="first")
    plain.add_special_tokens(["<s>"])
    return Tokenizer(spec_of(plain, bos_token="<s>", bos_token_id=BOS, add_bos=True))


def echoed(tokenizer: Tokenizer, token_ids: list[int], text: str = "") -> tuple[str, list[str], list[int]]:
    """The text of the answer's beginning, its tokens and where they stand."""
    choices = CompletionChoices(0, echo=True, echo_text=text)
    request = prepared(logprobs=0)
    request.tokens = np.array(token_ids, np.uint32)
    choices.begin(request, ServedModel(model().info, tokenizer))
    entry = inference_pb2.TokenLogprobs(logprob=-1.0)
    told = inference_pb2.PromptLogprobs(start=1, tokens=[entry] * (len(token_ids) - 1))
    end = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH)
    assert not choices.take(inference_pb2.GenerateResponse(prompt_logprobs=told))
    echo, _ = choices.take(inference_pb2.GenerateResponse(finished=end))
    assert echo.logprobs is not None
    return echo.text, echo.logprobs.tokens, echo.logprobs.text_offset


def test_the_space_that_the_first_word_loses_takes_no_place() -> None:
    text, _, offsets = echoed(of_words(), [THE, QUICK, FOX])
    assert (text, offsets) == ("the quick fox", [0, 3, 9])


def test_a_bos_that_the_client_sent_is_text_and_the_first_word_behind_it_keeps_its_space() -> None:
    text, tokens, offsets = echoed(of_words(), [BOS, THE, QUICK])
    assert (text, offsets) == ("<s> the quick", [0, 3, 7])
    assert tokens == [text[start:end] for start, end in pairwise([*offsets, len(text)])]


@pytest.mark.parametrize(("written", "places"), [("the quick fox", [0, 0, 3, 9]), ("<s> the quick fox", [0, 3, 7, 13])])
def test_a_bos_that_the_client_did_not_write_takes_no_place(written: str, places: list[int]) -> None:
    tokenizer = of_words()
    assert tokenizer.encode(written).tolist() == [BOS, THE, QUICK, FOX]
    text, tokens, offsets = echoed(tokenizer, [BOS, THE, QUICK, FOX], written)
    assert (text, tokens, offsets) == (written, ["<s>", " the", " quick", " fox"], places)


def test_the_tokens_of_one_character_stand_at_its_place() -> None:
    known = model().tokenizer
    assert known is not None
    text, _, offsets = echoed(known, list("é!€.".encode()))
    assert (text, offsets) == ("é!€.", [0, 0, 1, 2, 2, 2, 3])


def offsets_of(*deltas: inference_pb2.Delta) -> list[int]:
    choices = CompletionChoices(0, echo=False)
    choices.begin(prepared(logprobs=0), model())
    parts = [part for delta in deltas for part in choices.take(inference_pb2.GenerateResponse(delta=delta))]
    return [offset for part in parts if part.logprobs is not None for offset in part.logprobs.text_offset]


def spoken(tokens: bytes, text: str, *others: int) -> inference_pb2.Delta:
    ids = [*tokens, *others]
    return inference_pb2.Delta(
        token_ids=ids, text=text, logprobs=[inference_pb2.TokenLogprobs(logprob=-1.0)] * len(ids)
    )


def test_text_that_is_held_back_counts_as_text() -> None:
    """As where a stop string may begin."""
    assert offsets_of(spoken(b"a", "a"), spoken(b"S", ""), spoken(b"T", ""), spoken(b"x", "STx")) == [0, 1, 2, 3]


def test_the_tokens_of_a_character_of_an_answer_stand_at_its_place() -> None:
    assert offsets_of(spoken("é".encode(), "é"), spoken("€!".encode(), "€!")) == [0, 0, 1, 1, 1, 2]


def test_a_special_token_that_the_text_leaves_out_takes_no_place() -> None:
    assert offsets_of(spoken(b"a", "a", 256), spoken(b"b", "b", 256, ord("c"))) == [0, 1, 1, 2, 2]
