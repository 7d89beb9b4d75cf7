"""Plans for models and devices that are not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.doctor.devices import DEVICES, find_device
from deploy.doctor.planning import Wanted, alternatives, find_shape, fits
from tests.support.tiny_model import tiny_model
from worker.model.footprint import FORMATS

GIB = 1 << 30
Run = Callable[..., tuple[int, str, str]]


def wanted(model: str, device: str, dtype: str = "bfloat16", **settings: object) -> Wanted:
    source, config = find_shape(model)
    return Wanted(model, source, config, FORMATS[dtype], find_device(device), **settings)  # type: ignore[arg-type]


def plan(radixfleet: Run, *arguments: str) -> tuple[int, dict[str, object]]:
    code, out, _ = radixfleet("doctor", "--plan", "--json", *arguments)
    return code, json.loads(out)


def test_a_70b_model_in_bf16_does_not_fit_80_gb_and_is_told_what_does(radixfleet: Run) -> None:
    """Behaviour 62: weights too large ask for memory or a smaller model; no share or chunk is proposed."""
    code, told = plan(radixfleet, "--model", "llama-3.1-70b", "--device", "H100-80GB", "--dtype", "bf16")
    assert code == 1
    assert told["fits"] is False
    assert told["weights_bytes"] == 141_107_412_992
    advice = str(told["advice"])
    assert "weights alone need 131.42 GiB" in advice
    assert "mem-fraction" not in advice
    assert "chunk" not in advice
    options = told["alternatives"]
    assert isinstance(options, list)
    assert [option.split(":")[0] for option in options] == [
        "fp8 on H100-80",
        "int4 on H100-80",
        "bfloat16 on H200-141",
        "bfloat16 on 2 x H100-80",
    ]
    assert "does not compute with it" in options[0]
    assert "no tensor parallelism" in options[-1]


def test_in_fp8_it_does_fit(radixfleet: Run) -> None:
    code, told = plan(radixfleet, "--model", "llama-3.1-70b", "--device", "H100", "--dtype", "fp8")
    assert code == 0
    assert told["fits"] is True
    pools = told["pools"]
    assert isinstance(pools, dict)
    assert pools["weights_bytes"] + pools["kv_bytes"] + pools["activations_bytes"] == told["device_bytes"]
    assert 70e9 < pools["weights_bytes"] < 73e9
    assert told["kv_bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert pools["activations_bytes"] >= told["activation_estimate_bytes"]
    assert told["alternatives"] == []


def test_the_text_explains_every_number_and_says_which_bound_binds(radixfleet: Run) -> None:
    code, out, _ = radixfleet("doctor", "--plan", "--model", "llama-3.1-8b", "--device", "L4-24")
    assert code == 0
    assert "8,030,261,248 parameters x 2 bytes = 15.0 GiB (16.1 GB)" in out
    assert "2 (K and V) x 32 layers x 8 KV heads x 128 x 2 bytes = 128.0 KiB" in out
    assert "estimate; a worker measures them at start" in out
    binding = [line for line in out.splitlines() if line.endswith("<- binds")]
    assert len(binding) == 1
    assert "activation peak" in binding[0]
    assert "mem_fraction_static 0.9 of the 6.54 GiB" in out
    _, smaller, _ = radixfleet(
        "doctor", "--plan", "--model", "llama-3.1-8b", "--device", "L4-24", "--mem-fraction-static", "0.5"
    )
    assert "mem_fraction_static 0.5 of the 6.54 GiB left after the weights  <- binds" in smaller


def test_without_cuda_graphs_what_they_would_take_is_the_pools(radixfleet: Run) -> None:
    """What a plan advises can be planned."""
    arguments = ["--model", "smollm2-135m", "--device", "1GiB"]
    _, recorded = plan(radixfleet, *arguments)
    code, plain = plan(radixfleet, *arguments, "--no-cuda-graphs")
    assert code == 0
    taken_bytes = int(str(recorded["graphs_estimate_bytes"]))
    assert taken_bytes > 50 << 20
    assert plain["graphs_estimate_bytes"] == 0
    assert "CUDA graphs: none (--no-cuda-graphs)" in "".join(plain["explanation"])  # type: ignore[arg-type]
    pools = [told["pools"]["kv_bytes"] for told in (recorded, plain)]  # type: ignore[index]
    assert abs(pools[1] - pools[0] - taken_bytes) < 16 * int(str(plain["kv_bytes_per_token"])), "but for a page"
    assert "--no-cuda-graphs" in radixfleet("doctor", "--help")[1]


@pytest.mark.parametrize("path", ["", "config.json"])
def test_a_model_is_planned_from_its_configuration_alone(radixfleet: Run, tmp_path: Path, path: str) -> None:
    (tmp_path / "config.json").write_text((tiny_model() / "config.json").read_text())
    code, told = plan(radixfleet, "--model", str(tmp_path / path), "--device", "64MiB")
    assert code == 0
    assert told["source"] == str(tmp_path / path)
    assert told["device_bytes"] == 64 << 20


def test_a_pool_too_small_to_be_of_use_is_no_fit(radixfleet: Run) -> None:
    """It would start, and refuse nearly every request."""
    size = str(wanted("llama-3.1-8b", "80GiB").weights_bytes + 3 * GIB // 2)
    code, out, _ = radixfleet("doctor", "--plan", "--model", "llama-3.1-8b", "--device", size)
    assert code == 1
    assert "too small to be of use" in out
    assert "bfloat16 on A10-24" in out


def test_a_context_that_was_asked_for_must_fit() -> None:
    assert fits(wanted("qwen3-32b", "A100-80", context_length=32_768)) is not None
    assert fits(wanted("llama-3.1-70b", "H200", context_length=131_072)) is None
    larger = list(alternatives(wanted("llama-3.1-70b", "H200", context_length=131_072)))
    assert any(text.startswith("bfloat16 on B200-180") for text in larger)


def test_a_pool_below_the_models_own_limit_is_a_warning_with_what_to_change(radixfleet: Run) -> None:
    """It runs; but a request that the model allows would be refused, and nobody would have known."""
    code, out, _ = radixfleet("doctor", "--plan", "--model", "llama-3.1-8b", "--device", "24GiB")
    assert code == 0
    _, found, advice = out.partition("warning:")
    assert found
    assert "65,920 tokens, less than one request of the model's own limit of 131,072" in advice
    assert "--context-length 65920" in advice
    assert "int4 on a device of 24.0 GiB" in advice
    assert "bfloat16 on A100-40" in advice
    assert "--mem-fraction-static" not in advice, "no share is enough on this device"


def test_a_share_that_would_hold_the_models_limit_is_proposed(radixfleet: Run) -> None:
    small = ["--model", "llama-3.1-8b", "--device", "34GiB", "--mem-fraction-static"]
    code, told = plan(radixfleet, *small, "0.8")
    assert code == 0
    assert "Raise --mem-fraction-static to 0.841 or more" in str(told["warning"])
    assert plan(radixfleet, *small, "0.841")[1]["warning"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "llama-3.1-8b", "--device", "H100-80"],
        ["--model", "llama-3.1-8b", "--device", "24GiB", "--context-length", "66640"],
        ["--model", "llama-3.1-70b", "--device", "H100-80"],
    ],
)
def test_no_warning_where_the_longest_request_fits_or_an_error_has_said_it(
    radixfleet: Run, arguments: list[str]
) -> None:
    assert plan(radixfleet, *arguments)[1]["warning"] == []
    assert "warning" not in radixfleet("doctor", "--plan", *arguments)[1]


def test_where_nothing_fits_it_says_so(radixfleet: Run) -> None:
    code, out, _ = radixfleet("doctor", "--plan", "--model", "llama-3.1-405b", "--device", "2GiB", "--dtype", "int4")
    assert code == 1
    assert "nothing known here fits" in out


@pytest.mark.parametrize(
    ("text", "name", "usable"),
    [
        ("H100-80GB", "H100-80", 81_559 * (1 << 20) - GIB),
        ("h100", "H100-80", 81_559 * (1 << 20) - GIB),
        ("a100-40", "A100-40", 39 * GIB),
        ("24GiB", "a device of 24.0 GiB", 24 * GIB),
        ("80GB", "a device of 74.5 GiB", 80 * 10**9),
    ],
)
def test_devices_by_name_and_by_size(text: str, name: str, usable: int) -> None:
    device = find_device(text)
    assert (device.name, device.usable_bytes) == (name, usable)


def test_devices_are_listed_smallest_first() -> None:
    sizes = [device.total_bytes for device in DEVICES.values()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "--model", "demo", "--device", "A100"], "name one of A100-40, A100-80"),
        (["--plan", "--model", "demo", "--device", "X9"], "H100-80"),
        (["--plan", "--model", "nonesuch", "--device", "L4"], "known are llama-3.1-8b"),
        (["--plan", "--model", "demo"], "needs a --model and a --device"),
        (["--plan", "--device", "L4"], "needs a --model and a --device"),
        (["--page-size", "16"], "--page-size goes with --plan"),
        (["--no-cuda-graphs"], "--no-cuda-graphs goes with --plan"),
    ],
)
def test_wrong_use_is_answered_with_what_to_write(radixfleet: Run, arguments: list[str], words: str) -> None:
    code, _, err = radixfleet("doctor", *arguments)
    assert code == 2
    assert words in err


def test_pages_that_no_worker_takes_are_in_no_plan(radixfleet: Run) -> None:
    code, out, err = radixfleet("doctor", "--plan", "--model", "demo", "--device", "1GiB", "--page-size", "7")
    assert (code, out) == (2, "")
    assert "must divide 64" in err
