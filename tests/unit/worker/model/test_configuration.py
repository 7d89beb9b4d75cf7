import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import Architecture, tiny_model
from worker.model.configuration import LinearScaling, Llama3Scaling, ModelConfig, config_from_gguf, load_config
from worker.model.errors import BrokenModel, ModelNotFound, UnsupportedModel
from worker.model.gguf_file import GgufFile

ARCHITECTURES: list[Architecture] = ["llama", "mistral", "qwen2", "qwen3"]


def changed(tmp_path: Path, architecture: Architecture = "llama", drop: tuple[str, ...] = (), **fields: Any) -> Path:
    """A directory whose config.json differs from the tiny model's in the given fields."""
    config = json.loads((tiny_model(architecture) / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in config if name not in drop}))
    return tmp_path


def test_a_directory_gives_its_numbers() -> None:
    assert load_config(tiny_model()) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        max_context_tokens=4096,
        sliding_window=None,
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_gguf_file_of_a_model_says_the_same_as_its_directory(architecture: Architecture, tmp_path: Path) -> None:
    directory = load_config(tiny_model(architecture))
    file = load_config(write_gguf(tiny_model(architecture), tmp_path / "tiny.gguf"))
    name = "llama" if architecture == "mistral" else architecture
    assert file.rms_norm_eps == pytest.approx(directory.rms_norm_eps)  # GGUF keeps it as float32
    assert replace(file, rms_norm_eps=1e-5) == replace(directory, architecture=name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_number_of_parameters_is_that_of_the_file(architecture: Architecture) -> None:
    tensors = load_file(tiny_model(architecture) / "model.safetensors")
    assert load_config(tiny_model(architecture)).num_parameters == sum(tensor.size for tensor in tensors.values())


def test_tied_embeddings_count_once() -> None:
    tied, apart = load_config(tiny_model(tie_word_embeddings=True)), load_config(tiny_model())
    assert apart.num_parameters - tied.num_parameters == 512 * 64


def test_kv_bytes_per_token() -> None:
    assert load_config(tiny_model()).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


def test_what_older_files_leave_out_is_derived(tmp_path: Path) -> None:
    config = load_config(changed(tmp_path, drop=("head_dim", "num_key_value_heads", "tie_word_embeddings")))
    assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (16, 4, False)


def test_both_spellings_of_the_rope_settings_are_read(tmp_path: Path) -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    old = load_config(changed(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3}))
    assert (old.rope_theta, old.rope_scaling) == (5e5, expected)
    new = {"rope_type": "llama3", "rope_theta": 5e5, **llama3}
    new_config = load_config(changed(tmp_path, drop=("rope_theta",), rope_parameters=new))
    assert (new_config.rope_theta, new_config.rope_scaling) == (5e5, expected)
    oldest = load_config(changed(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}))
    assert oldest.rope_scaling == LinearScaling(2.0)
    assert load_config(changed(tmp_path, rope_parameters={"rope_type": "default"})).rope_scaling is None


def test_linear_scaling_lengthens_the_context_that_is_stated_before_it(tmp_path: Path) -> None:
    stated = load_config(changed(tmp_path)).max_context_tokens
    linear = {"rope_type": "linear", "factor": 2.5}
    assert load_config(changed(tmp_path, rope_parameters=linear)).max_context_tokens == int(2.5 * stated)
    whole = {**linear, "original_max_position_embeddings": stated // 2}
    assert load_config(changed(tmp_path, rope_parameters=whole)).max_context_tokens == stated


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "linear", "rope_type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2, "type": None}),
        (None, {"rope_type": "linear", "factor": 2, "rope_theta": None}),
        ({"type": "linear", "factor": 2}, {}),
    ],
)
def test_one_rotation_may_be_given_in_two_spellings(tmp_path: Path, older: object, newer: object) -> None:
    config = load_config(changed(tmp_path, rope_theta=5e5, rope_scaling=older, rope_parameters=newer))
    assert (config.rope_theta, config.rope_scaling) == (5e5, LinearScaling(2))
    plain = changed(tmp_path, rope_scaling={"type": "default"}, rope_parameters={"rope_theta": 10_000})
    assert load_config(plain).rope_scaling is None


def test_end_tokens_are_the_union_of_both_files(tmp_path: Path) -> None:
    changed(tmp_path, eos_token_id=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 3]}))
    assert load_config(tmp_path).eos_token_ids == (3, 7, 9)
    changed(tmp_path, eos_token_id=[-1, 7, 10**9])
    assert load_config(tmp_path).eos_token_ids == (3, 7, 9), (
        "no token has the others, and none is to be banned for them"
    )
    changed(tmp_path, drop=("eos_token_id",))
    (tmp_path / "generation_config.json").unlink()
    assert load_config(tmp_path).eos_token_ids == ()


def test_gguf_end_of_turn_counts_as_an_end(tmp_path: Path) -> None:
    file = write_gguf(tiny_model(), tmp_path / "t.gguf", metadata={"tokenizer.ggml.eot_token_id": 0})
    assert load_config(file).eos_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("architecture", "fields", "window"),
    [
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 100, "model_type": "other"}, 100),
        ("llama", {"sliding_window": 100}, None),
        ("qwen2", {"sliding_window": 100}, None),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True}, 100),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_sliding_windows(
    tmp_path: Path, architecture: Architecture, fields: dict[str, Any], window: int | None
) -> None:
    config = load_config(changed(tmp_path, architecture, **fields))
    assert config.sliding_window == window
    assert config.usable_context_tokens == (window or 4096)


def test_a_mistral_that_does_not_name_its_window_has_that_of_transformers(tmp_path: Path) -> None:
    path = changed(tmp_path, "mistral", drop=("sliding_window",), max_position_embeddings=32_768)
    assert load_config(path).usable_context_tokens == 4096


def test_biases_follow_the_architecture(tmp_path: Path) -> None:
    qwen2 = load_config(tiny_model("qwen2"))
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    llama = load_config(changed(tmp_path, attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are LlamaForCausalLM"),
        ({"architectures": []}, "none named"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq checkpoints are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "differs between layers",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type is given as yarn and as default; remove the one that is not meant",
        ),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is given as 500000.0 and as 10000.0"),
        ({"quantization_config": "awq"}, "awq checkpoints are not supported"),
        ({"is_causal": False}, "is_causal"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported, only 'linear' and 'llama3'"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_config(changed(tmp_path, **fields))


@pytest.mark.parametrize("factor", [0.0, -2.0, float("inf")])
def test_a_scaling_factor_that_is_none_is_refused(tmp_path: Path, factor: float) -> None:
    with pytest.raises(BrokenModel, match="RoPE scaling factor"):
        load_config(changed(tmp_path, rope_scaling={"type": "linear", "factor": factor}))


@pytest.mark.parametrize(
    "stated",
    [
        {"high_freq_factor": 1.0},
        {"high_freq_factor": 0.5},
        {"high_freq_factor": float("inf")},
        {"low_freq_factor": 0.0},
        {"original_max_position_embeddings": 0},
    ],
)
def test_so_are_bounds_of_frequencies_that_are_none(tmp_path: Path, stated: dict[str, Any]) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(BrokenModel, match="RoPE scaling with a low_freq_factor of"):
        load_config(changed(tmp_path, rope_scaling=llama3 | stated))


def test_broken_directories_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        load_config(tmp_path)
    with pytest.raises(BrokenModel, match="lacks the field 'hidden_size'"):
        load_config(changed(tmp_path, drop=("hidden_size",)))
    for fields in ({"rms_norm_eps": None}, {"rope_scaling": "linear"}, {"rope_scaling": [1]}):
        with pytest.raises(BrokenModel, match="wrong type"):
            load_config(changed(tmp_path, **fields))
    for content, message in (("{", "is not valid JSON"), ("[]", "does not hold a JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(BrokenModel, match=message):
            load_config(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma"}, "gemma is not supported; supported are llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 8}, "partial rotation"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"llama.attention.causal": False}, r"attention\.causal"),
        ({"split.count": 3}, "one part of several"),
    ],
)
def test_gguf_files_of_other_kinds_are_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    file = GgufFile(write_gguf(tiny_model(), tmp_path / "t.gguf"))
    file.metadata |= metadata
    with pytest.raises(UnsupportedModel, match=message):
        config_from_gguf(file)


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4.0),
        ({"scaling.factor": 4.0}, 4.0),
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.type": "linear"}, None),
    ],
)
def test_gguf_files_scale_rotations_as_llama_cpp_reads_them(
    tmp_path: Path, scaling: dict[str, Any], factor: float | None
) -> None:
    file = GgufFile(write_gguf(tiny_model(), tmp_path / "t.gguf"))
    file.metadata |= {f"llama.rope.{name}": value for name, value in scaling.items()}
    assert config_from_gguf(file).rope_scaling == (None if factor is None else LinearScaling(factor))


def test_a_gguf_file_that_lacks_a_number_is_broken(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tiny_model(), tmp_path / "t.gguf"))
    del file.metadata["llama.block_count"]
    with pytest.raises(BrokenModel, match=r"lacks the metadata llama\.block_count"):
        config_from_gguf(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and must divide hidden_size"),
        ({"num_attention_heads": 0, "head_dim": 16}, "num_attention_heads is 0, and must be a whole number from 1"),
        ({"num_attention_heads": 7}, "num_attention_heads is 7, and must divide hidden_size, which is 64"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, and must be a whole number from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, and must divide num_attention_heads, which is 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 2.7}, r"num_hidden_layers is 2\.7, and must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"use_sliding_window": True, "sliding_window": 8.5}, r"sliding_window is 8\.5"),
        ({"num_key_value_heads": 2.5}, r"num_key_value_heads is 2\.5"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"vocab_size": float("inf")}, "vocab_size is inf"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"head_dim": 15}, "head_dim is 15, and must be even"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"rope_theta": 0}, "rope_theta is 0, and must be a positive number"),
        ({"rope_theta": -1e4}, "rope_theta is -10000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, and must be a positive number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    dropped = () if "head_dim" in fields else ("head_dim",)
    rope = {"rope_parameters": None} if "rope_theta" in fields else {}
    with pytest.raises(BrokenModel, match=rf"config\.json: {message}"):
        load_config(changed(tmp_path, drop=dropped, **fields, **rope))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention.head_count", 0, "attention.head_count is 0"),
        ("attention.head_count_kv", 3, "attention.head_count_kv is 3, and must divide attention.head_count, which is"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "attention.layer_norm_rms_epsilon is nan"),
        ("block_count", -2, "block_count is -2"),
        ("block_count", 2.5, "block_count is 2.5, and must be a whole number"),
        ("block_count", True, "block_count is True, and must be a whole number"),
        ("attention.head_count_kv", 2.0, "attention.head_count_kv is 2.0, and must be a whole number"),
        ("rope.scaling.factor", "x", "RoPE scaling factor of 'x' is none"),
        ("rope.scaling.factor", [1.0], r"RoPE scaling factor of \[1.0\] is none"),
        ("rope.freq_base", 0.0, "rope.freq_base is 0, and must be a positive number"),
        ("embedding_length", "64", "llama.embedding_length is '64', and must be a number"),
    ],
)
def test_so_are_those_of_gguf_files(tmp_path: Path, name: str, value: object, message: str) -> None:
    file = GgufFile(write_gguf(tiny_model(), tmp_path / "t.gguf"))
    file.metadata |= {f"llama.{name}": value}
    with pytest.raises(BrokenModel, match=message):
        config_from_gguf(file)
