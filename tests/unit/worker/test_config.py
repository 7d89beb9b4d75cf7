"""Settings of the worker, and what follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixfleet.settings import SettingsError, load
from tests.support.byte_tokenizer import byte_spec
from worker.app import make_engine
from worker.config import WorkerSettings
from worker.engine.inline import InlineEngine
from worker.engine.process import ProcessEngine
from worker.runner.torch_runner import TorchRunner


@pytest.mark.parametrize(
    ("model", "name"),
    [("/models/Llama-3/", "Llama-3"), ("a/b/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"), ("demo", "demo")],
)
def test_the_model_is_named_after_its_directory_or_file(model: str, name: str) -> None:
    assert WorkerSettings(model=model).model_name == name
    assert WorkerSettings(model=model, served_model_name="chosen").model_name == "chosen"


@pytest.mark.parametrize("page_size", [3, 5, 24, 48, 128, 0])
def test_a_page_size_must_divide_a_routing_block(page_size: int) -> None:
    with pytest.raises(SettingsError, match="page-size"):
        load(WorkerSettings, {"model": "m", "page_size": str(page_size)})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mem_fraction_static", "1.5", "less than 1"),
        ("device", "gpu", "device"),
        ("dtype", "int8", "dtype"),
        ("schedule_policy", "shortest", "lpm"),
        ("port", "70000", "65535"),
        ("advertise_address", "10.0.0.1", "host:port"),
        ("advertise_address", "10.0.0.1:0", "host:port"),
        ("routers", "http://10.0.0.1:7070", "host:port"),
        ("device", "tpu", "auto, cpu, cuda or cuda:N; got 'tpu'"),
        ("device", "cuda:0\n", "cuda:N"),
        ("worker_id", "", "at least 1 characters"),
        ("routers", "10.0.0.1:7070,10.0.0.2", "host:port"),
        ("context_length", "1", "at least 2"),
        ("threads", "0", "at least 1"),
    ],
)
def test_a_wrong_value_is_refused_with_the_setting_and_what_to_write(name: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(WorkerSettings, {"model": "m", name: value})


@pytest.mark.parametrize(("page_size", "least"), [(1, 2), (16, 32), (64, 128)])
def test_a_pool_that_no_request_fits_is_refused_with_the_least_that_does(page_size: int, least: int) -> None:
    def settings(max_total_tokens: int) -> WorkerSettings:
        return load(WorkerSettings, {"model": "m", "page_size": page_size, "max_total_tokens": max_total_tokens})

    for too_few in (1, least - 1):
        with pytest.raises(SettingsError, match=f"--max-total-tokens {too_few} leaves no room .* set it to {least} "):
            settings(too_few)
    assert settings(least).max_total_tokens == least


def test_one_port_given_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="--port and --metrics-port are both 7081: give each a port of its own"):
        load(WorkerSettings, {"model": "m", "port": "7081"})
    assert load(WorkerSettings, {"model": "m", "port": "0", "metrics_port": "0"}).port == 0


def test_the_model_is_required() -> None:
    with pytest.raises(SettingsError, match="--model"):
        load(WorkerSettings, {})


def test_every_setting_has_a_description() -> None:
    assert [name for name, field in WorkerSettings.model_fields.items() if not field.description] == []


def test_inline_is_one_process() -> None:
    settings = WorkerSettings(model="m", runner="sim")
    assert isinstance(make_engine(settings, Path("m"), byte_spec()), ProcessEngine)
    inline = settings.model_copy(update={"inline": True})
    assert isinstance(make_engine(inline, Path("m"), byte_spec()), InlineEngine)


def test_deterministic_inference_reaches_the_runner() -> None:
    """What the runner then does: tests/integration/test_deterministic_inference.py."""
    for wanted in (False, True):
        settings = load(WorkerSettings, {"model": "m", "inline": True, "enable_deterministic_inference": wanted})
        engine = make_engine(settings, Path("m"), byte_spec())
        assert isinstance(engine, InlineEngine)
        assert isinstance(engine._runner, TorchRunner)
        assert engine._runner._config.deterministic is wanted
