"""The step that takes the most memory: what a runner measures at start."""

from __future__ import annotations

import numpy as np

from radixfleet.types import MAX_LOGPROBS
from worker.core.logits import LogitEdits
from worker.core.step import RowStart, StepPlan, rows_for


def largest_step(num_sequences: int, chunk: int, max_context: int) -> StepPlan:
    """A chunk at the end of the longest context, beside decoding rows of that length in all other rows.

    Every row is drawn the costly way, edited and told of, and a tile of the chunk is told of as a prompt. All slots are
    0, the padding sink: the step can run on a pool of one page.
    """
    lengths = np.ones(num_sequences, np.int32)
    lengths[0] = chunk
    starts = max_context - lengths
    num_tokens = int(lengths.sum())
    return StepPlan(
        step=0,
        row_starts=tuple(
            _row_start(row, int(starts[row]), told_tokens=rows_for(num_sequences) if row == 0 else 0)
            for row in range(num_sequences)
        ),
        rows=np.arange(num_sequences, dtype=np.int32),
        starts=starts,
        lengths=lengths,
        samples=np.ones(num_sequences, np.bool_),
        relayed=lengths == 1,
        input_ids=np.zeros(num_tokens, np.int32),
        slots=np.zeros(num_tokens, np.int32),
    )


def _row_start(row: int, computed: int, *, told_tokens: int) -> RowStart:
    prompt_tokens = computed + told_tokens
    return RowStart(
        row=row,
        prefix_slots=np.zeros(computed, np.int32),
        temperature=1.0,
        top_p=0.9,
        top_k=0,
        min_p=0.01,
        seed=row,
        prompt_tokens=prompt_tokens,
        min_new_tokens=0,
        stop_token_ids=(),
        edits=LogitEdits(frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1, bias=((0, 1.0),)),
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS if told_tokens else None,
        history=np.zeros(prompt_tokens, np.int32),
    )
