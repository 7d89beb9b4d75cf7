"""Penalties from counts on the device against the slow form, over any history, on rows that were used before."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.slow_sampling import penalized
from worker.sampling.penalties import Occurrences

VOCAB = 12
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)
rows = st.tuples(tokens, tokens, tokens, st.sampled_from([0.5, 1.0, 1.7]), st.floats(-2, 2), st.floats(-2, 2))


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@given(st.lists(rows, min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_penalties_are_those_of_the_slow_form(rows: list, seed: int) -> None:
    """Behaviour 32: the newest token counts at once, and the repetition penalty applies once per token."""
    occurrences = Occurrences(max_rows=8, vocab_size=VOCAB, device=torch.device("cpu"))
    numbers = torch.arange(len(rows)) * 2 + 1
    for row in range(8):
        occurrences.start(row, array([1, 1, 2]), array([3, 3, 3]))
    for number, (prompt, answer, *_) in zip(numbers.tolist(), rows, strict=True):
        occurrences.start(number, array(prompt), array(answer))
    for step in range(max(len(more) for _, _, more, *_ in rows)):
        going = [index for index, (_, _, more, *_) in enumerate(rows) if step < len(more)]
        occurrences.count(numbers[going], torch.tensor([rows[index][2][step] for index in going]))

    logits = np.random.default_rng(seed).normal(scale=3, size=(len(rows), VOCAB)).astype(np.float32)
    repetition, frequency, presence = (torch.tensor([row[i] for row in rows], dtype=torch.float32) for i in (3, 4, 5))
    fast = occurrences.penalize(
        torch.from_numpy(logits.copy()), numbers, repetition=repetition, frequency=frequency, presence=presence
    )
    for index, (prompt, answer, more, *_) in enumerate(rows):
        slow = penalized(
            logits[index].astype(np.float64),
            prompt,
            answer + more,
            repetition=float(repetition[index]),
            frequency=float(frequency[index]),
            presence=float(presence[index]),
        )
        np.testing.assert_allclose(fast[index].numpy(), slow, rtol=1e-5, atol=1e-5)
