"""Which layer operations serve a model: kernels of Triton on a GPU, each tried before it is chosen, elsewhere torch.

As with attention (`worker.runner.attention.trial`), what cannot be compiled here, fails, or computes something else is
passed by with a line in the log. All that a step may launch has been compiled then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog
import torch
from torch import Tensor

from worker.memory.kv_pool import KvPlace
from worker.memory.transfers import still_computes
from worker.model.configuration import ModelConfig
from worker.model.layer_ops import HeadNorms, LayerOps, torch_ops
from worker.runner.devices import DeviceError

_log = structlog.get_logger()
_MOST_DIFFERENCE = 0.02
"""Of a token's result from torch's, relative: roundings make a fifth of it in bfloat16, a wrong element far more."""
_NUM_TOKENS = 5


def choose_layer_ops(shape: ModelConfig, device: torch.device, dtype: torch.dtype, *, fused: bool = True) -> LayerOps:
    """The fastest that work. `fused` False: torch's, to compare with. Raises DeviceError where a trial has left the
    device unusable, and OutOfMemoryError.
    """
    plain = torch_ops()
    if device.type != "cuda" or not fused:
        return plain
    try:
        from worker.model.fused_ops import FUSED  # there is no Triton but on Linux
    except ImportError as error:
        _log.info("layers without kernels of Triton: steps are slower", why=f"{error} (pip install 'radixfleet[gpu]')")
        return plain
    except Exception as error:  # noqa: BLE001 - packages and compilers fail as they like
        _log.warning("layers without kernels of Triton: steps are slower", why=f"{type(error).__name__}: {error}")
        return plain
    chosen, passed_by = try_layer_ops(FUSED, plain, shape, device, dtype)
    if passed_by:
        _log.warning("layers without some kernels of Triton: steps are slower", passed_by=passed_by)
    else:
        _log.info("layers by kernels of Triton")
    return chosen


@torch.inference_mode()
def try_layer_ops(
    fused: LayerOps, plain: LayerOps, shape: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[LayerOps, dict[str, str]]:
    """`fused`, but for what fails or differs from `plain` on a few tokens of such a model; and why, by its name."""
    given = _Given.of(shape, device, dtype)
    chosen, passed_by = fused, dict[str, str]()
    for name, compute in _TRIALS.items():
        try:
            why = _differs(compute, fused, plain, given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # packages and compilers fail as they like
            first_line = str(error).strip().partition("\n")[0]
            why = f"its trial failed: {type(error).__name__}: {first_line}"
            if not still_computes(device):
                raise DeviceError(f"Triton's kernel {name} has left {device} unusable: {why}. Remove triton") from error
        if why is not None:
            passed_by[name] = why
            chosen = replace(chosen, **{name: getattr(plain, name)})
    return chosen, passed_by


@dataclass(frozen=True, slots=True)
class _Given:
    """Random tokens of a model's sizes."""

    hidden: Tensor
    added: Tensor
    weight: Tensor
    epsilon: float
    heads: Tensor
    factors: tuple[Tensor, Tensor]
    norms: HeadNorms | None
    place: KvPlace
    gate_up: Tensor

    @classmethod
    def of(cls, shape: ModelConfig, device: torch.device, dtype: torch.dtype) -> _Given:
        generator = torch.Generator().manual_seed(1)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        head_dim, num_all = shape.head_dim, shape.num_heads + 2 * shape.num_kv_heads
        low_sine = numbers(_NUM_TOKENS, 1, head_dim // 2)
        low_cosine = numbers(_NUM_TOKENS, 1, head_dim // 2)
        pool = torch.zeros((2, 3 * _NUM_TOKENS, shape.num_kv_heads, head_dim), dtype=dtype, device=device)
        return cls(
            hidden=numbers(_NUM_TOKENS, shape.hidden_size),
            added=numbers(_NUM_TOKENS, shape.hidden_size),
            weight=numbers(shape.hidden_size),
            epsilon=shape.rms_norm_eps,
            heads=numbers(_NUM_TOKENS, num_all, head_dim),
            factors=(torch.cat((low_cosine, low_cosine), -1), torch.cat((-low_sine, low_sine), -1)),
            norms=HeadNorms(numbers(head_dim), numbers(head_dim), shape.rms_norm_eps) if shape.qk_norm else None,
            place=KvPlace(pool[0], pool[1], torch.arange(_NUM_TOKENS, 0, -1).to(device) * 2),
            gate_up=numbers(_NUM_TOKENS, 2 * shape.intermediate_size),
        )


def _add_and_norm(ops: LayerOps, given: _Given, tokens: slice) -> list[Tensor]:
    added = given.added[tokens].clone()
    with_added = ops.add_and_norm(given.hidden[tokens].clone(), added, given.weight, given.epsilon)
    return [*with_added, *ops.add_and_norm(given.hidden[tokens].clone(), None, given.weight, given.epsilon)]


def _rotate_and_keep(ops: LayerOps, given: _Given, tokens: slice) -> list[Tensor]:
    keys, values = given.place.keys.clone(), given.place.values.clone()
    cosine, signed_sine = given.factors
    slots = given.place.slots[tokens].clone()
    factors, place = (cosine[tokens].clone(), signed_sine[tokens].clone()), KvPlace(keys, values, slots)
    queries = ops.rotate_and_keep(given.heads[tokens].clone(), factors, given.norms, place)
    others = torch.ones(len(keys), dtype=torch.bool).to(keys.device).index_fill_(0, slots, value=False)
    untouched = torch.stack((keys[others].float().abs().sum(), values[others].float().abs().sum()))
    return [queries, keys[slots], values[slots], (1 + untouched).expand(len(queries), 2)]


def _gate(ops: LayerOps, given: _Given, tokens: slice) -> list[Tensor]:
    return [ops.gate(given.gate_up[tokens].clone())]


_Compute = Callable[[LayerOps, _Given, slice], Sequence[Tensor]]
_TRIALS: dict[str, _Compute] = {"add_and_norm": _add_and_norm, "rotate_and_keep": _rotate_and_keep, "gate": _gate}


def _differs(compute: _Compute, fused: LayerOps, plain: LayerOps, given: _Given) -> str | None:
    """Why the fused operation is none to be used; None: it is."""
    everything, one = slice(0, _NUM_TOKENS), slice(2, 3)
    ours = compute(fused, given, everything)
    for result, alone, expected in zip(
        ours, compute(fused, given, one), compute(plain, given, everything), strict=True
    ):
        a, b = result.flatten(1).float(), expected.flatten(1).float()
        difference = float(((a - b).norm(dim=1) / b.norm(dim=1)).max())
        if not difference < _MOST_DIFFERENCE:
            return f"its trial gave another result, off by {difference:.2g} of it"
        if not torch.equal(result[one], alone):
            return "its trial gave a token other bits alone than in a batch"
    return None
