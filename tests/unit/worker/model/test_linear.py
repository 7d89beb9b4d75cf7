import pytest
import torch

from worker.model.linear import DenseBackend, PackedBackend, choose_linear_backend

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 3, 8, 64, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_and_dense_layers_agree(rows: int, with_bias: bool) -> None:
    backend = choose_linear_backend(CPU, torch.bfloat16)
    if not isinstance(backend, PackedBackend):
        pytest.skip("this build of torch cannot pack weights")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 160, generator=generator, dtype=torch.bfloat16)
    bias = torch.randn(96, generator=generator, dtype=torch.bfloat16) if with_bias else None
    x = torch.randn(rows, 160, generator=generator, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for made in (backend, DenseBackend()):
        layer = made.prepare(weight, bias)
        assert layer.nbytes == 96 * 160 * 2 + (96 * 2 if with_bias else 0)
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-2, atol=0.2)


def test_float32_stays_dense() -> None:
    assert isinstance(choose_linear_backend(CPU, torch.float32), DenseBackend)


def test_a_row_does_not_depend_on_nan_in_another() -> None:
    backend = choose_linear_backend(CPU, torch.bfloat16)
    layer = backend.prepare(torch.randn(32, 64, dtype=torch.bfloat16), None)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    poisoned = x.clone()
    poisoned[2] = torch.nan
    kept = [0, 1, 3]
    assert torch.equal(layer(poisoned)[kept], layer(x)[kept])
