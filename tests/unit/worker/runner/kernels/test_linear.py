from __future__ import annotations

import pytest
import torch

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
