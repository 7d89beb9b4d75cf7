import numpy as np
import torch

from worker.sampling.penalties import Occurrences

CPU = torch.device("cpu")


def started(prompt: list[int], answer: list[int]) -> Occurrences:
    occurrences = Occurrences(max_rows=2, vocab_size=6, device=CPU)
    occurrences.start(1, np.array(prompt, np.int32), np.array(answer, np.int32))
    return occurrences


def penalize(occurrences: Occurrences, logits: list[float], **penalties: float) -> list[float]:
    values = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0} | penalties
    changed = occurrences.penalize(
        torch.tensor([logits]), torch.tensor([1]), **{name: torch.tensor([value]) for name, value in values.items()}
    )
    return changed[0].tolist()


def test_the_repetition_penalty_applies_once_per_token_of_prompt_and_answer() -> None:
    """Behaviour 32: tokens 0 and 1 came twice, and once in each of prompt and answer; 2 and 3 came never."""
    occurrences = started([0, 1, 0], [1, 4])
    assert penalize(occurrences, [4.0, -4.0, 4.0, -4.0, 8.0, 0.0], repetition=2.0) == [2, -8, 4, -4, 4, 0]


def test_frequency_counts_each_time_and_presence_once_and_neither_the_prompt() -> None:
    occurrences = started([5, 5], [1, 1, 2])
    assert penalize(occurrences, [0.0] * 6, frequency=0.5) == [0, -1, -0.5, 0, 0, 0]
    assert penalize(occurrences, [0.0] * 6, presence=0.25) == [0, -0.25, -0.25, 0, 0, 0]


def test_a_token_counts_as_soon_as_it_is_sampled() -> None:
    """Behaviour 32: no plan has to know the token."""
    occurrences = started([0], [])
    occurrences.count(torch.tensor([1]), torch.tensor([3]))
    occurrences.count(torch.tensor([1]), torch.tensor([3]))
    assert penalize(occurrences, [1.0] * 6, frequency=1.0) == [1, 1, 1, -1, 1, 1]
    assert penalize(occurrences, [1.0] * 6, repetition=2.0) == [0.5, 1, 1, 0.5, 1, 1]


def test_other_rows_are_left_alone() -> None:
    occurrences = started([0], [1])
    occurrences.start(0, np.array([4], np.int32), np.array([5, 5], np.int32))
    occurrences.count(torch.tensor([0]), torch.tensor([2]))
    assert penalize(occurrences, [1.0] * 6, repetition=2.0, presence=1.0) == [0.5, -0.5, 1, 1, 1, 1]


def test_what_a_row_held_before_is_forgotten() -> None:
    occurrences = started([0, 1, 2], [3, 4, 5])
    occurrences.start(1, np.array([], np.int32), np.array([2], np.int32))
    assert penalize(occurrences, [1.0] * 6, repetition=2.0) == [1, 1, 0.5, 1, 1, 1]


def test_the_memory_is_told() -> None:
    assert started([], []).nbytes == 2 * 6 * 4
