"""What a client is still to be sent: the order of its messages, and what becomes of those that wait."""

from __future__ import annotations

import numpy as np

from radixfleet.v1 import inference_pb2
from router.dispatch.open_link import CREDIT
from worker.core.logits import TokenLogprobs
from worker.core.messages import PromptLogprobs
from worker.servicer.choice import Outbox


def taken(outbox: Outbox) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse()
    outbox.take(response)
    return response


def test_messages_come_in_the_order_of_the_contract() -> None:
    outbox = Outbox()
    outbox.finished.append((1, inference_pb2.Finished(text="end")))
    outbox.add(1, [5], [], ["five"])
    outbox.add(0, [4], [], ["four"])
    outbox.tell_prompt(prompt_logprobs(2))
    outbox.started = inference_pb2.Started(worker_id="w")
    messages = []
    while not outbox.is_empty:
        messages.append(taken(outbox))
    assert [message.WhichOneof("event") for message in messages] == [
        "started",
        "prompt_logprobs",
        "delta",
        "delta",
        "finished",
    ]
    assert [message.index for message in messages[2:]] == [1, 0, 1]


def test_tokens_that_wait_are_joined_with_their_log_probabilities() -> None:
    outbox = Outbox()
    for token_id in range(3):
        outbox.add(0, [token_id], [TokenLogprobs(-token_id / 2, [token_id, 9], [-0.5, -1.0])], [f"<{token_id}>"])
    delta = taken(outbox).delta
    assert outbox.is_empty
    assert (list(delta.token_ids), delta.text) == ([0, 1, 2], "<0><1><2>")
    assert [each.logprob for each in delta.logprobs] == [0.0, -0.5, -1.0]
    assert [list(each.top_token_ids) for each in delta.logprobs] == [[0, 9], [1, 9], [2, 9]]


def test_a_long_prompt_is_told_in_runs_that_join() -> None:
    outbox = Outbox()
    outbox.tell_prompt(prompt_logprobs(2500))
    runs = []
    while not outbox.is_empty:
        runs.append(taken(outbox).prompt_logprobs)
    assert [(run.start, len(run.tokens)) for run in runs] == [(1, 1024), (1025, 1024), (2049, 452)]
    tokens = [token for run in runs for token in run.tokens]
    assert [token.top_token_ids[1] for token in tokens] == list(range(1, 5000, 2))


def test_a_client_that_reads_nothing_leaves_a_few_megabytes_in_its_inbox() -> None:
    """Of the largest messages: runs of a prompt's log probabilities, with the 20 likeliest of a large vocabulary."""
    outbox = Outbox()
    outbox.tell_prompt(prompt_logprobs(1024 * CREDIT, num_top=20, first_id=200_000))
    num_bytes = 0
    for _ in range(CREDIT):
        num_bytes += taken(outbox).ByteSize()
    assert outbox.is_empty
    assert num_bytes < 8 * 1024**2


def prompt_logprobs(num_tokens: int, *, num_top: int = 2, first_id: int = 0) -> PromptLogprobs:
    """So many of the likeliest tokens for each."""
    logprobs = np.full(num_tokens, -1.0, dtype=np.float32)
    tops = np.full(num_top * num_tokens, -1.0, dtype=np.float32)
    ids = np.arange(first_id, first_id + num_top * num_tokens, dtype=np.int32)
    return PromptLogprobs(1, 1, logprobs, ids, tops)
