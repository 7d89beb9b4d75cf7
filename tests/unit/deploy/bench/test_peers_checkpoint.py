"""The comparison with peers: they get the very weights that our engine loads."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from deploy.bench.peers.checkpoint import gguf_file, hugging_face_directory, quantized_gguf_file
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import tiny_model
from worker.model.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
from worker.model.configuration import config_from_directory, config_from_gguf
from worker.model.errors import UnsupportedModel
from worker.model.gguf_file import GgufFile
from worker.model.tokenizer_files import load_tokenizer_spec


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gguf_file_as_a_directory(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    source = tiny_model(architecture=architecture)  # type: ignore[arg-type]
    model = write_gguf(source, tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    directory = hugging_face_directory(model, dtype, tmp_path / "cache")
    config = config_from_gguf(GgufFile(model))
    ours, theirs = GgufCheckpoint(GgufFile(model), config), SafetensorsCheckpoint(directory)
    assert theirs.names() == ours.names() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    for name in theirs.names():
        assert torch.equal(theirs.tensor(name), ours.tensor(name).to(dtype)), name
    written = config_from_directory(directory)
    for field in set(config.__slots__) - {"architecture", "eos_token_ids"}:  # it lists all, where the file names one
        assert getattr(written, field) == getattr(config, field), field
    assert load_tokenizer_spec(directory).fingerprint() == load_tokenizer_spec(model).fingerprint()


def test_it_is_written_once_for_each_content(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    model = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    first = hugging_face_directory(model, torch.float32, cache)
    written_ns = (first / "model.safetensors").stat().st_mtime_ns
    assert hugging_face_directory(model, torch.float32, cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written_ns
    assert hugging_face_directory(model, torch.bfloat16, cache) != first
    model.unlink()
    write_gguf(tiny_model(hidden_size=128, num_heads=2, num_kv_heads=1), model)
    assert hugging_face_directory(model, torch.float32, cache) != first, "another model under the same name"
    assert len(list(cache.iterdir())) == 3, "nothing temporary is left"


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert hugging_face_directory(tiny_model(), torch.bfloat16, tmp_path) == tiny_model()
    for refuse in (quantized_gguf_file, lambda model: gguf_file(model, torch.bfloat16, tmp_path, lambda *_: None)):
        with pytest.raises(UnsupportedModel, match=r"reads \.gguf files"):
            refuse(tiny_model())


def test_rope_factors_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    model = write_gguf(tiny_model(), tmp_path / "tiny.gguf", rope_freqs=np.ones(8))
    with pytest.raises(UnsupportedModel, match="RoPE factors"):
        hugging_face_directory(model, torch.bfloat16, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_gguf_file_in_another_format_is_converted_once(tmp_path: Path) -> None:
    model = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    calls: list[str] = []

    def convert(source: Path, target: Path, kind: str) -> None:
        calls.append(kind)
        target.write_bytes(source.read_bytes())

    for _ in range(2):
        made = gguf_file(model, torch.bfloat16, tmp_path / "cache", convert)
        assert made.read_bytes() == model.read_bytes()
    assert calls == ["BF16"]
