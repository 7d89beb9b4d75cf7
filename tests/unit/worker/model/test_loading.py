import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.plain_attention import CausalAttention
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import Architecture, tiny_model
from worker.model.checkpoint import SafetensorsCheckpoint, split_pairs
from worker.model.errors import BrokenModel, ModelNotFound, UnsupportedModel
from worker.model.linear import DenseBackend
from worker.model.llama import LlamaModel
from worker.model.loading import load_model

PROMPT = torch.tensor([1, 40, 300, 77, 12, 511, 8])


def load(path: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return load_model(path, device=torch.device("cpu"), dtype=dtype, linear_backend=DenseBackend())


def logits(model: LlamaModel, output_rows: Tensor | None = None) -> Tensor:
    positions = torch.arange(len(PROMPT))
    attention = CausalAttention(model.config, len(PROMPT), model.weights.embedding.dtype)
    return model.forward(PROMPT, positions, attention, positions if output_rows is None else output_rows)


def copy_with(tmp_path: Path, architecture: Architecture = "llama", **tensors: Tensor | None) -> Path:
    """A copy of the tiny model with tensors replaced, added, or (None) removed; "__" stands for a dot."""
    target = tmp_path / "model"
    shutil.copytree(tiny_model(architecture), target)
    weights = load_file(target / "model.safetensors")
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, target / "model.safetensors")
    return target


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_logits_of_the_directory(architecture: Architecture, tmp_path: Path) -> None:
    directory = tiny_model(architecture)
    file = write_gguf(directory, tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(load(file)), logits(load(directory)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16])
def test_quantized_files_give_nearly_the_same_logits(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    exact = logits(load(tiny_model()))
    near = logits(load(write_gguf(tiny_model(), tmp_path / "tiny.gguf", kind=kind)))
    assert torch.corrcoef(torch.stack((exact.flatten(), near.flatten())))[0, 1] > 0.999


def test_frequency_divisors_of_gguf_files_are_applied(tmp_path: Path) -> None:
    plain = load(write_gguf(tiny_model(), tmp_path / "a.gguf"))
    same = load(write_gguf(tiny_model(), tmp_path / "b.gguf", rope_freqs=np.ones(8)))
    other = load(write_gguf(tiny_model(), tmp_path / "c.gguf", rope_freqs=np.full(8, 4.0)))
    assert torch.equal(logits(plain), logits(same))
    assert not torch.allclose(logits(plain), logits(other), atol=0.1)


def test_split_pairs_undoes_the_interleaving_of_converters() -> None:
    rows = torch.arange(2 * 8 * 3.0).view(16, 3)
    interleaved = rows.view(2, 2, 4, 3).transpose(1, 2).reshape(16, 3)
    assert not torch.equal(interleaved, rows)
    assert torch.equal(split_pairs(interleaved, num_heads=2), rows)


def test_logits_are_float32_and_only_of_the_rows_asked_for() -> None:
    model = load(tiny_model(), torch.bfloat16)
    everything = logits(model)
    assert everything.dtype == torch.float32
    some = logits(model, torch.tensor([6, 2]))
    torch.testing.assert_close(some, everything[[6, 2]], rtol=1e-2, atol=1e-1)
    none = logits(model, torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 512)


def test_tied_heads_share_their_memory_and_it_counts_once() -> None:
    tied, apart = load(tiny_model(tie_word_embeddings=True)), load(tiny_model())
    assert apart.nbytes - tied.nbytes == 512 * 64 * 4
    assert apart.weights.nbytes == apart.config.num_parameters * 4


def sharded(tmp_path: Path, extra: dict[str, Tensor]) -> Path:
    """The tiny model in two files; the second holds `extra` as well, which the index does not name there."""
    weights = load_file(tiny_model() / "model.safetensors")
    shutil.copy(tiny_model() / "config.json", tmp_path)
    names = sorted(weights)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    save_file({name: weights[name] for name in names[:9]}, tmp_path / "model-1.safetensors")
    save_file({name: weights[name] for name in names[9:]} | extra, tmp_path / "model-2.safetensors")
    index = {"weight_map": {name: part for part, members in parts.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_sharded_directories_are_read_through_their_index(tmp_path: Path) -> None:
    assert torch.equal(logits(load(sharded(tmp_path, {}))), logits(load(tiny_model())))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(BrokenModel, match=r"lacks model-2\.safetensors, which its index names"):
        load(tmp_path)
    for broken in ("", "{}", '{"weight_map": []}', '{"weight_map": {"lm_head.weight": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(BrokenModel, match=r"model\.safetensors\.index\.json"):
            load(tmp_path)


def test_of_what_several_files_hold_the_index_says_which_counts(tmp_path: Path) -> None:
    first = min(load_file(tiny_model() / "model.safetensors"))
    path = sharded(tmp_path, {first: torch.zeros(512, 64)})
    assert torch.equal(logits(load(path)), logits(load(tiny_model())))


def test_what_a_file_holds_and_the_index_omits_is_not_passed_over(tmp_path: Path) -> None:
    path = sharded(tmp_path, {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(UnsupportedModel, match=r"holds 1 tensors that .* does not have .*q_proj\.bias"):
        load(path)


def test_what_the_index_alone_has_is_missed_only_where_it_is_wanted(tmp_path: Path) -> None:
    path = sharded(tmp_path, {})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = "model-1.safetensors"
    del index["weight_map"]["lm_head.weight"]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(load(path)), logits(load(tiny_model())))


def test_an_index_that_does_not_fit_the_files_is_told(tmp_path: Path) -> None:
    path = sharded(tmp_path, {})
    shutil.copy(tiny_model() / "model.safetensors", path)
    with pytest.raises(BrokenModel, match=r"model\.safetensors is not among the files of .*: remove the one"):
        load(path)
    (path / "model.safetensors").unlink()
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-1.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModel, match=r"model-1\.safetensors lacks the tensor model\.norm\.weight"):
        load(path)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, name: str, number: float) -> None:
    spoilt = load_file(tiny_model() / "model.safetensors")[name]
    spoilt.view(-1)[-1] = number
    with pytest.raises(BrokenModel, match=f"tensor {re.escape(name)} holds NaN"):
        load(copy_with(tmp_path, **{name.replace(".", "__"): spoilt}))


def test_weights_beyond_the_dtype_are_named(tmp_path: Path) -> None:
    path = copy_with(tmp_path, model__norm__weight=torch.full((64,), 70_000.0))
    assert load(path).weights.norm[0] == 70_000.0
    with pytest.raises(
        BrokenModel, match=r"model\.norm\.weight holds .* too large for float16: .* set another --dtype"
    ):
        load(path, torch.float16)
    large = copy_with(tmp_path / "large", model__norm__weight=torch.tensor([-65_000.0, 65_000.0] * 32))
    assert load(large, torch.float16).weights.norm[1] > 64_000


def test_a_tied_head_that_is_another_is_refused(tmp_path: Path) -> None:
    embedding = load_file(tiny_model(tie_word_embeddings=True) / "model.safetensors")["model.embed_tokens.weight"]
    target = tmp_path / "model"
    shutil.copytree(tiny_model(tie_word_embeddings=True), target)
    weights = load_file(target / "model.safetensors")
    save_file(weights | {"lm_head.weight": embedding.clone()}, target / "model.safetensors")
    assert torch.equal(logits(load(target)), logits(load(tiny_model(tie_word_embeddings=True))))
    for head in (2 * embedding, torch.cat([embedding, embedding[:8]])):  # transformers refuses one with more rows, too
        save_file(weights | {"lm_head.weight": head}, target / "model.safetensors")
        with pytest.raises(BrokenModel, match=r"lm_head\.weight is not that of .* set tie_word_embeddings to false"):
            load(target)


def test_progress_counts_layers() -> None:
    seen: list[tuple[int, int]] = []
    load_model(
        tiny_model(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        linear_backend=DenseBackend(),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]


def test_tensors_that_nothing_uses_are_refused(tmp_path: Path) -> None:
    path = copy_with(tmp_path, model__layers__0__self_attn__q_norm__weight=torch.ones(16))
    with pytest.raises(UnsupportedModel, match=r"holds 1 tensors that .* does not have .*q_norm"):
        load(path)


def test_missing_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(copy_with(tmp_path, model__layers__1__mlp__up_proj__weight=None))
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(BrokenModel, match=r"model\.norm\.weight has the shape \(63,\), .* asks for \(64,\)"):
        load(copy_with(tmp_path, model__norm__weight=torch.ones(63)))
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="quantized directories are not supported"):
        load(copy_with(tmp_path, model__norm__weight=torch.ones(64, dtype=torch.int8)))


def test_a_qwen2_without_its_biases_is_broken(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"lacks the tensor .*q_proj\.bias"):
        load(copy_with(tmp_path, "qwen2", model__layers__0__self_attn__q_proj__bias=None))


def test_damaged_and_absent_weights_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="pickle files"):
        SafetensorsCheckpoint(tmp_path)
    data = (tiny_model() / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BrokenModel, match="damaged or cut short"):
        SafetensorsCheckpoint(tmp_path)
