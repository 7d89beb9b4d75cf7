import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import tiny_model
from worker.model.errors import BrokenModel, ModelNotFound, UnsupportedModel
from worker.model.gguf_file import GgufFile

Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_model(), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write_tensor(path: Path, values: np.ndarray, kind: Kind) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("before", np.arange(7, dtype=np.float32))
    writer.add_tensor("t", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Kind.F32, 0), (Kind.F16, 1e-3), (Kind.BF16, 1e-2), (Kind.Q8_0, 2e-2), (Kind.Q4_1, 0.2), (Kind.Q4_0, 0.3)],
)
def test_tensors_come_back_within_the_precision_of_their_format(tmp_path: Path, kind: Kind, tolerance: float) -> None:
    values = np.random.default_rng(1).uniform(-1, 1, (6, 64)).astype(np.float32)
    read = GgufFile(write_tensor(tmp_path / "t.gguf", values, kind)).dequantized("t")
    assert read.dtype == np.float32
    assert read.shape == values.shape
    assert np.abs(read - values).max() <= tolerance
    if kind is not Kind.F32:
        assert np.abs(read - values).max() > 0  # the format was really used


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
def test_formats_decode_as_the_reference_reader_does(tmp_path: Path, kind: Kind) -> None:
    values = np.random.default_rng(2).normal(size=(5, 96)).astype(np.float32)
    path = write_tensor(tmp_path / "t.gguf", values, kind)
    reference = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "t")
    expected = gguf.quants.dequantize(reference.data, reference.tensor_type)
    np.testing.assert_array_equal(GgufFile(path).dequantized("t"), expected)


def test_metadata_and_directory_are_what_the_reference_reader_says(file: Path) -> None:
    ours, reference = GgufFile(file), gguf.GGUFReader(file)
    fields = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for name, field in fields.items():
        assert ours.metadata[name] == field.contents(), name
    assert {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reference.tensors} == {
        name: tensor.shape for name, tensor in ours.tensors.items()
    }


def test_tensors_are_writable_so_that_torch_takes_them_as_they_are(file: Path) -> None:
    assert GgufFile(file).dequantized("token_embd.weight").flags.writeable


@pytest.mark.parametrize("keep", [4, 20, 30, 300, 2000])
def test_a_header_cut_short_is_a_broken_model(file: Path, tmp_path: Path, keep: int) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BrokenModel, match="cut short"):
        GgufFile(short)


def test_tensor_data_cut_short_is_a_broken_model_that_names_the_tensor(file: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BrokenModel, match=r"cut short: tensor \S+ ends after the file, download it again"):
        GgufFile(short)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Kind.F32, (1 << 32, 1 << 32)), (Kind.F32, (1 << 63,)), (Kind.F32, (1,) * 65), (Kind.Q8_0, (33,))],
)
def test_a_shape_that_no_tensor_has_is_a_broken_model(tmp_path: Path, kind: Kind, shape: tuple[int, ...]) -> None:
    """Its elements do not fit the file, though 64 bits count none, or are no whole blocks."""
    damaged = tmp_path / "damaged.gguf"
    entry = struct.pack(f"<Q1sI{len(shape)}QIQ", 1, b"t", len(shape), *shape, kind, 0)
    damaged.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(128))
    with pytest.raises(BrokenModel, match="tensor t "):
        GgufFile(damaged)


def test_what_is_no_gguf_file_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(ModelNotFound, match="no such file"):
        GgufFile(path)
    path.write_bytes(b"")
    with pytest.raises(BrokenModel, match="is empty"):
        GgufFile(path)
    path.write_bytes(b"PK\x03\x04 and more that is a zip file")
    with pytest.raises(BrokenModel, match="is not a GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_and_byte_orders_are_refused(file: Path, tmp_path: Path, version: int) -> None:
    other = tmp_path / "other.gguf"
    data = bytearray(file.read_bytes())
    data[4:8] = struct.pack("<I", version)
    other.write_bytes(data)
    with pytest.raises(UnsupportedModel, match="little-endian versions 2 and 3"):
        GgufFile(other)


def test_a_format_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", np.zeros((2, 64), np.int32), raw_dtype=Kind.I32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="t is stored as I32"):
        GgufFile(path).dequantized("t")
