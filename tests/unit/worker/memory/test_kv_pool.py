import pytest
import torch

from worker.memory.kv_pool import TokenToKVPool


def pool(num_pages: int = 5, page_size: int = 4) -> TokenToKVPool:
    return TokenToKVPool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_written_tokens_are_found_at_their_slots_of_their_layer() -> None:
    kv = pool()
    for tensor in (*kv.keys, *kv.values):
        tensor[kv.page_size :] = -1.0
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([17, 4, 9])
    kv.place(1, slots).write(k, v)
    assert torch.equal(kv.keys[1][slots], k)
    assert torch.equal(kv.values[1][slots], v)
    untouched = [slot for slot in range(4, 20) if slot not in (17, 4, 9)]
    assert (kv.keys[1][untouched] == -1).all()
    for layer in (0, 2):
        assert (kv.keys[layer][4:] == -1).all()
        assert (kv.values[layer][4:] == -1).all()


def test_strided_views_are_written_as_they_are_seen() -> None:
    """K and V are cut out of one fused projection."""
    kv = pool()
    fused = torch.randn(3, 6, 8)
    kv.place(0, torch.tensor([5, 6, 7])).write(fused[:, 2:4], fused[:, 4:])
    assert torch.equal(kv.keys[0][5:8], fused[:, 2:4])
    assert torch.equal(kv.values[0][5:8], fused[:, 4:])


def test_the_padding_sink_is_zero() -> None:
    assert all((tensor[:4] == 0).all() for tensor in (*pool().keys, *pool().values))


def test_slots_of_a_gpu_hold_zeros_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 35: kernels that multiply what is masked by 0 must not find another process's NaN there."""
    zeros, made = torch.zeros, list[tuple[int, ...]]()

    def noted(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(shape)
        return zeros(shape, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "zeros", noted)
    TokenToKVPool(
        num_pages=2,
        page_size=4,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("meta"),  # as a GPU, not the CPU
    )
    assert made == [(8, 1, 8)] * 2


def test_bytes() -> None:
    assert pool().nbytes == 5 * 4 * 3 * 2 * (2 * 8 * 4)
