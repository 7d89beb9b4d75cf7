from __future__ import annotations

import pytest
import torch

from worker.model.linear import LikeliestLinear, Linear
from worker.runner.kernels.compiler import find_compiler
from worker.runner.kernels.library import Kernels
from worker.runner.kernels.linear import KernelLinearBackend


@pytest.fixture(scope="module")
def backend() -> KernelLinearBackend:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    return KernelLinearBackend(Kernels(num_threads=2))


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 32, 33, 100, 256, 289, 545])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 160), (100, 32), (7, 64), (144, 3200), (600, 96)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_exact_and_no_row_depends_on_another(
    backend: KernelLinearBackend, rows: int, out_features: int, in_features: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(out_features, in_features, generator=generator, dtype=torch.bfloat16)
    bias = torch.randn(out_features, generator=generator, dtype=torch.bfloat16) if with_bias else None
    x = torch.randn(rows, in_features, generator=generator, dtype=torch.bfloat16)
    layer = backend.prepare(weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    y = layer(x)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-4 * in_features**0.5)
    assert torch.equal(torch.cat([layer(x[:1]), layer(x[1:])]) if rows > 1 else layer(x), y)


def test_a_row_does_not_depend_on_nan_in_another(backend: KernelLinearBackend) -> None:
    """Behaviour 35: through linear layers."""
    layer = backend.prepare(torch.randn(32, 64, dtype=torch.bfloat16), None)
    x = torch.randn(20, 64, dtype=torch.bfloat16)
    poisoned = x.clone()
    poisoned[2] = torch.nan
    kept = [row for row in range(20) if row != 2]
    assert layer(poisoned)[2].isnan().all()
    assert torch.equal(layer(poisoned)[kept], layer(x)[kept])


def likeliest(layer: Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(layer, LikeliestLinear)
    return layer.likeliest(x)


@pytest.mark.parametrize("rows", [1, 3, 17, 32, 40, 300])
@pytest.mark.parametrize("out_features", [1, 7, 40, 100, 5000])
def test_the_largest_result_is_that_of_all_results(backend: KernelLinearBackend, rows: int, out_features: int) -> None:
    """Also among equals, of which there are many: the first."""
    generator = torch.Generator().manual_seed(rows * out_features)
    weight = torch.randint(-2, 3, (out_features, 32), generator=generator).bfloat16()
    layer = backend.prepare(weight, torch.randint(-2, 3, (out_features,), generator=generator).bfloat16())
    x = torch.randint(-1, 2, (rows, 32), generator=generator).bfloat16()
    values, features = likeliest(layer, x)
    everything = layer(x).float().numpy()
    assert features.tolist() == everything.argmax(axis=1).tolist()
    assert values.tolist() == everything.max(axis=1).tolist()


def test_results_that_rounding_makes_equal_are_equals(backend: KernelLinearBackend) -> None:
    weight = torch.zeros(64, 32)
    weight[40, :2], weight[50, :2], weight[3, 0] = torch.tensor([256.0, 0.5]), torch.tensor([256.0, 0.75]), 255.0
    layer = backend.prepare(weight.bfloat16(), None)
    values, features = likeliest(layer, torch.ones(1, 32).bfloat16())
    assert (values.item(), features.item()) == (256.0, 40)


@pytest.mark.parametrize("at", [0, 33, 4999])
@pytest.mark.parametrize("beside", [-1.0, torch.inf])
def test_a_nan_is_the_largest_of_its_own_row(backend: KernelLinearBackend, at: int, beside: float) -> None:
    """Behaviour 35: through the head."""
    bias = torch.full((5000,), beside)
    bias[at] = torch.nan
    weight = torch.zeros(5000, 32, dtype=torch.bfloat16)
    for rows in (1, 40):
        values, features = likeliest(backend.prepare(weight, bias.bfloat16()), torch.ones(rows, 32).bfloat16())
        assert values.isnan().all()
        assert features.tolist() == [at] * rows


@pytest.mark.parametrize("value", [-torch.inf, torch.inf])
def test_what_is_infinite_everywhere_is_told_as_such(backend: KernelLinearBackend, value: float) -> None:
    layer = backend.prepare(torch.zeros(100, 32, dtype=torch.bfloat16), torch.full((100,), value).bfloat16())
    values, features = likeliest(layer, torch.ones(3, 32).bfloat16())
    assert values.tolist() == [value] * 3
    assert features.tolist() == [0] * 3
