"""What the wire may carry, and that values come out as they went in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from radixfleet import convert, types
from radixfleet.convert import check_names, check_tokens, pack_tokens, prompt_form, unpack_tokens
from radixfleet.errors import InvalidRequest
from radixfleet.rates import PromptTokens, Recent, Totals
from radixfleet.types import ChatMessage, ChatPrompt
from radixfleet.v1 import inference_pb2 as pb
from radixfleet.v1 import worker_pb2


def refused(call, *args, **options) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(*args, **options)
    return caught.value


class TestTokens:
    @pytest.mark.parametrize("ids", [[], [0], [1, 2**32 - 1, 7]])
    def test_both_forms_give_the_same(self, ids):
        array = np.array(ids, dtype=np.uint32)
        packed = pb.TokenIds.FromString(pack_tokens(array).SerializeToString())
        plain = pb.TokenIds(ids=ids)
        for message in (packed, plain):
            tokens = unpack_tokens(message)
            assert tokens.dtype == np.uint32
            assert tokens.tolist() == ids

    def test_packed_is_little_endian(self):
        assert pack_tokens(np.array([1, 258], dtype=np.uint32)).packed == b"\1\0\0\0\2\1\0\0"
        assert pack_tokens(np.array([1], dtype=">u4")).packed == b"\1\0\0\0"

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 4097])
    def test_ragged_bytes_are_refused(self, size):
        assert refused(unpack_tokens, pb.TokenIds(packed=bytes(size)), "x").field == "x.packed"

    def test_both_forms_at_once_are_refused(self):
        assert refused(unpack_tokens, pb.TokenIds(packed=bytes(4), ids=[0])).field == "token_ids"

    def test_ids_outside_the_vocabulary_are_refused(self):
        check_tokens(np.array([0, 9], dtype=np.uint32), vocab_size=10)
        error = refused(check_tokens, np.array([0, 10, 3], dtype=np.uint32), vocab_size=10)
        assert error.field == "prompt"
        assert "10" in str(error)

    def test_a_prompt_without_tokens_is_refused(self):
        """Behaviour 40: an empty prompt has a clear answer."""
        assert "no tokens" in str(refused(check_tokens, np.empty(0, np.uint32), vocab_size=10))


class TestPrompt:
    def test_text(self):
        assert prompt_form(pb.Prompt(text="hé")) == "hé"
        assert prompt_form(pb.Prompt(text="")) == ""

    def test_token_ids(self):
        form = prompt_form(pb.Prompt(token_ids=pb.TokenIds(ids=[3, 1])))
        assert isinstance(form, np.ndarray)
        assert form.tolist() == [3, 1]

    @pytest.mark.parametrize(("given", "expected"), [({}, True), ({"add_generation_prompt": False}, False)])
    def test_chat(self, given, expected):
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="x")], **given)
        assert prompt_form(pb.Prompt(chat=chat)) == ChatPrompt(
            (ChatMessage("user", "hi"), ChatMessage("x", "")), expected
        )

    def test_what_the_chat_template_is_to_see_beside(self):
        message = pb.ChatMessage(role="assistant", extra_json='{"tool_calls": [{"a": 1.5}]}')
        chat = pb.Chat(messages=[message], tools_json='[{"name": "f"}]', variables_json='{"enable_thinking": false}')
        assert prompt_form(pb.Prompt(chat=chat)) == ChatPrompt(
            (ChatMessage("assistant", "", {"tool_calls": [{"a": 1.5}]}),),
            tools=({"name": "f"},),
            variables={"enable_thinking": False},
        )

    @pytest.mark.parametrize(
        ("field", "text"),
        [
            ("messages[0].extra_json", "[]"),
            ("tools_json", "{}"),
            ("tools_json", "[" * 9999),
            ("variables_json", '{"a": NaN}'),
            ("variables_json", '{"a": 1e999}'),
            ("variables_json", "{"),
        ],
    )
    def test_what_is_no_json_is_refused_by_name(self, field, text):
        """Behaviour 42."""
        chat = pb.Chat(messages=[{"role": "a"}])
        if field == "messages[0].extra_json":
            chat.messages[0].extra_json = text
        else:
            setattr(chat, field, text)
        with pytest.raises(InvalidRequest) as caught:
            prompt_form(pb.Prompt(chat=chat))
        assert caught.value.field == f"prompt.chat.{field}"

    @pytest.mark.parametrize(
        ("prompt", "field"),
        [
            (pb.Prompt(), "prompt"),
            (pb.Prompt(token_ids=pb.TokenIds()), "prompt.token_ids"),
            (pb.Prompt(token_ids=pb.TokenIds(packed=b"123")), "prompt.token_ids.packed"),
            (pb.Prompt(chat=pb.Chat()), "prompt.chat.messages"),
            (pb.Prompt(chat=pb.Chat(messages=[{"role": "a"}, {"content": "b"}])), "prompt.chat.messages[1].role"),
        ],
    )
    def test_refused_with_the_field(self, prompt, field):
        """Behaviour 40: an empty prompt in each of its forms."""
        assert refused(prompt_form, prompt).field == field


@pytest.mark.parametrize("name", ["request_id", "model", "cache_salt", "lease_id"])
def test_names_are_bounded(name):
    check_names(pb.GenerateRequest(**{name: "é" * 512}))
    assert refused(check_names, pb.GenerateRequest(**{name: "é" * 512 + "x"})).field == name


TOTALS = Totals(1, 2, 3, 2**40, 5, 6, 7, 0.25, 0.125, 8, 9, (10, 0, 11))

VALUES = [
    (
        convert.model_info_to_pb,
        convert.model_info,
        types.ModelInfo("m", 2048, 49152, (0, 2), True, 2**64 - 1, "bfloat16", 134_515_008),
    ),
    (convert.capacity_to_pb, convert.capacity, types.Capacity(2**40, 16, 256, 8192)),
    (convert.memory_pools_to_pb, convert.memory_pools, types.MemoryPools("cpu", 2**43, 2, 3, 4, "device memory")),
    (convert.load_to_pb, convert.load, types.Load(1, 2, 2**40, 4, 5)),
    (convert.accepted_load_to_pb, convert.accepted_load, types.AcceptedLoad(3, 2**40)),
    (convert.totals_to_pb, convert.totals, TOTALS),
    (convert.recent_to_pb, convert.recent, Recent(9.5, TOTALS, PromptTokens(5, 4, 3, 2, 1))),
    (convert.usage_to_pb, convert.usage, types.Usage(1, 2, 3, 0.25, 0.5, 1e-9)),
]


@pytest.mark.parametrize(("to_pb", "from_pb", "value"), VALUES, ids=lambda item: type(item).__name__)
def test_values_cross_the_wire_whole(to_pb, from_pb, value):
    message = to_pb(value)
    assert from_pb(type(message).FromString(message.SerializeToString())) == value


@pytest.mark.parametrize(("to_pb", "from_pb", "value"), VALUES, ids=lambda item: type(item).__name__)
def test_values_and_messages_have_the_same_fields(to_pb, from_pb, value):
    assert {field.name for field in dataclasses.fields(value)} == {
        field.name for field in to_pb(value).DESCRIPTOR.fields
    }


def test_every_reason_and_status_has_its_number():
    reasons = {convert.finish_reason_to_pb(reason) for reason in types.FinishReason}
    assert reasons == set(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED}
    assert all(convert.finish_reason(convert.finish_reason_to_pb(reason)) is reason for reason in types.FinishReason)
    statuses = {convert.worker_status_to_pb(status) for status in types.WorkerStatus}
    assert statuses == set(worker_pb2.WorkerStatus.values()) - {worker_pb2.WORKER_STATUS_UNSPECIFIED}
    assert all(convert.worker_status(convert.worker_status_to_pb(status)) is status for status in types.WorkerStatus)


def test_numbers_of_a_later_version_are_taken_carefully():
    assert convert.finish_reason(99) is types.FinishReason.ABORT
    assert convert.worker_status(99) is types.WorkerStatus.FAILED
