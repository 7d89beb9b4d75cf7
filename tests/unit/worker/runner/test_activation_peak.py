import torch

from worker.runner.activation_peak import activation_peak

MIB = 1 << 20
CPU = torch.device("cpu")


def block(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


def test_what_is_freed_does_not_add_up() -> None:
    def compute() -> None:
        for _ in range(5):
            block(3)

    assert activation_peak(CPU, compute) == 3 * MIB


def test_the_worst_moment_counts_and_not_the_end() -> None:
    def compute() -> torch.Tensor:
        first = block(2)
        second = first + block(2)  # three alive
        del first
        return second

    assert activation_peak(CPU, compute) == 6 * MIB


def test_views_share_their_memory_and_in_place_operators_take_none() -> None:
    outside = block(8)

    def compute() -> None:
        kept = [block(1)]
        kept += [kept[0].view(2, -1)[1], kept[0][5:], kept[0].add_(1)]
        kept.append(outside[:100].zero_())

    assert activation_peak(CPU, compute) == MIB


def test_what_was_there_before_does_not_count() -> None:
    before = [block(4)]

    def compute() -> None:
        before.clear()
        block(1)

    assert activation_peak(CPU, compute) == MIB


def test_addresses_that_are_used_again_are_counted_again() -> None:
    def compute() -> None:
        for _ in range(200):
            small = block(1)
            del small
        kept = [block(1) for _ in range(4)]
        assert len(kept) == 4

    assert activation_peak(CPU, compute) == 4 * MIB


def test_inference_mode_is_seen_too() -> None:
    def compute() -> None:
        with torch.inference_mode():
            weight = torch.ones(256, 256)
            torch.nn.functional.linear(torch.ones(1024, 256), weight)

    assert activation_peak(CPU, compute) == 4 * (256 * 256 + 2 * 1024 * 256)
