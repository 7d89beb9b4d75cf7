from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from structlog.testing import capture_logs
from torch import Tensor

from worker.model.linear import DenseBackend, Linear, LinearBackend, choose_linear_backend
from worker.model.row_invariance import RowInvariantBackend, equal_row_counts, row_invariant_silu

CPU = torch.device("cpu")


class _SumsBy:
    """A backend whose sums depend on the number of rows: from `many` rows on it adds up its columns from the end."""

    name = "fake"
    shares_weight = True

    def __init__(self, many: int) -> None:
        self._many = many
        self.calls: list[int] = []

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return _SumsByLinear(weight, bias, self._many, self.calls)


class _SumsByLinear:
    nbytes = 0

    def __init__(self, weight: Tensor, bias: Tensor | None, many: int, calls: list[int]) -> None:
        self._weight, self._bias, self._many, self._calls = weight, bias, many, calls

    def __call__(self, x: Tensor) -> Tensor:
        self._calls.append(len(x))
        columns = range(x.shape[1])
        result = torch.zeros(len(x), len(self._weight)) if self._bias is None else self._bias.repeat(len(x), 1)
        for column in reversed(columns) if len(x) >= self._many else columns:
            result = result + x[:, column, None] * self._weight[:, column]
        return result


class _DependsOnPlace(_SumsBy):
    """And one where the last row of a call is computed by other code."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        forwards, backwards = _SumsByLinear(weight, bias, 1000, []), _SumsByLinear(weight, bias, 0, [])

        class Layer:
            nbytes = 0

            def __call__(self, x: Tensor) -> Tensor:
                return torch.cat((forwards(x[:-1]), backwards(x[-1:])))

        return Layer()


def weight_and_rows(num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(24, 40, generator=generator), torch.randn(num_rows, 40, generator=generator)


@pytest.mark.parametrize("many", [17, 33, 100])
def test_only_row_counts_that_sum_alike_are_used(many: int) -> None:
    backend = _SumsBy(many)
    weight, _ = weight_and_rows(1)
    tile_sums_backwards = many <= 32
    expected = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if (count >= many) == tile_sums_backwards]
    assert list(equal_row_counts(backend, weight, None)) == expected


@pytest.mark.parametrize("many", [17, 33])
@pytest.mark.parametrize("num_rows", [1, 3, 31, 32, 33, 100, 700])
def test_each_row_is_what_it_is_alone(many: int, num_rows: int) -> None:
    weight, x = weight_and_rows(num_rows)
    layer = RowInvariantBackend(_SumsBy(many)).prepare(weight, None)
    together = layer(x)
    assert together.shape == (num_rows, 24)
    for row in range(0, num_rows, 7):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    torch.testing.assert_close(together, x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_layer_is_called_with_as_few_pieces_as_sum_alike() -> None:
    backend = _SumsBy(33)
    weight, x = weight_and_rows(77)
    layer = RowInvariantBackend(backend).prepare(weight, None)
    backend.calls.clear()
    layer(x)
    assert backend.calls == [32, 32, 16]
    assert layer(x[:0]).shape == (0, 24)


def test_where_a_rows_place_matters_rows_are_computed_one_by_one() -> None:
    weight, x = weight_and_rows(5)
    with capture_logs() as logs:
        layer = RowInvariantBackend(_DependsOnPlace(0)).prepare(weight, None)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert torch.equal(layer(x).roll(1, 0), layer(x.roll(1, 0)))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_machines_own_layers(dtype: torch.dtype, with_bias: bool) -> None:
    """Behaviour 30: through this machine's libraries, at a size where they change their kernels."""
    inner: LinearBackend = choose_linear_backend(CPU, dtype)
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(rows, 576, generator=generator).to(dtype) for rows in (192, 600))
    bias = torch.randn(192, generator=generator).to(dtype) if with_bias else None
    backend = RowInvariantBackend(inner)
    layer = backend.prepare(weight, bias)
    assert layer.nbytes == inner.prepare(weight, bias).nbytes
    assert backend.shares_weight == inner.shares_weight
    whole = layer(x)
    for num_rows in (1, 2, 3, 17, 33, 64, 200, 511):
        assert torch.equal(torch.cat([layer(part) for part in torch.split(x, num_rows)]), whole)
    torch.testing.assert_close(whole, functional.linear(x, weight, bias), rtol=2e-2, atol=0.5)


def test_a_layer_that_is_not_wrapped_does_depend_on_the_number_of_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(rows, 576, generator=generator) for rows in (192, 600))
    assert equal_row_counts(DenseBackend(), weight, None) != (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    layer = DenseBackend().prepare(weight, None)
    assert not torch.equal(torch.cat([layer(row[None]) for row in x]), layer(x))


@pytest.mark.parametrize("size", [60, 64, 1537, 40_000])
def test_silu_of_a_row_does_not_depend_on_the_others(size: int) -> None:
    """At 1537 columns and two threads, torch's own differs in the last bits of what lies at a cut."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        generator = torch.Generator().manual_seed(size)
        gate, _ = (torch.randn(129, 2 * size, generator=generator) * 3).chunk(2, dim=-1)
        whole = row_invariant_silu(gate)
        for num_rows in (1, 2, 43, 64, 100):
            parts = [row_invariant_silu(part) for part in torch.split(gate, num_rows)]
            assert torch.equal(torch.cat(parts), whole)
        torch.testing.assert_close(whole, functional.silu(gate))
    finally:
        torch.set_num_threads(threads)
