"""Reads GGUF files: metadata, tensor directory, and dequantized tensors.

Block formats are decoded by the `gguf` package. Its reader is not used: it makes several numpy objects for each entry
of the vocabulary and so takes seconds to open a file, which plain `struct` over a memory map does in a tenth of one.

    [0, 24)             magic "GGUF", version, number of tensors, number of metadata entries
    [24, a)             metadata entries: name, type, value
    [a, b)              tensor directory: name, dimensions (innermost first), type, offset from `data_start`
    [data_start, end)   tensor data; data_start = b rounded up to `general.alignment`
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from worker.model.errors import BrokenModel, ModelNotFound, UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Struct formats of the scalar metadata types by their number in the file."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory. `shape` is in the order of numpy and torch: outermost first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    """Offset in the file, in bytes."""
    num_bytes: int


class _Cursor:
    """Sequential reads from a buffer."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        """The next bytes; raises EOFError when the file ends before."""
        data = self._buffer[self.position : self.position + num_bytes]
        if len(data) != num_bytes:
            raise EOFError
        self.position += num_bytes
        return data

    def scalar(self, code: str) -> Any:
        """The next little-endian value of a struct format."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """The next length-prefixed string."""
        return self.take(self.scalar("Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        """The next metadata value of a given type; arrays become lists."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, length = self.scalar("I"), self.scalar("Q")
            code = _SCALAR_FORMATS.get(item_kind)
            if code is None:
                return [self.value(item_kind) for _ in range(length)]
            return list(struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize("<" + code))))
        if kind not in _SCALAR_FORMATS:
            raise BrokenModel(f"metadata of unknown type {kind}")
        return self.scalar(_SCALAR_FORMATS[kind])


class GgufFile:
    """A GGUF file, mapped read-only for as long as the object lives."""

    def __init__(self, path: Path) -> None:
        """Raises ModelNotFound, BrokenModel (not GGUF, or cut short) or UnsupportedModel (version, tensor type)."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelNotFound(f"no such file: {path}") from error
        except ValueError as error:
            raise BrokenModel(f"{path} is empty") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except (EOFError, OverflowError, MemoryError) as error:
            raise BrokenModel(f"{path} is cut short or damaged: its header does not end within the file") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._map)
        if cursor.take(4) != _MAGIC:
            raise BrokenModel(f"{self.path} is not a GGUF file")
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self.path} is GGUF version {version}; little-endian versions 2 and 3 can be read: convert it again"
            )
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_entries):
            name, kind = cursor.string(), cursor.scalar("I")
            self.metadata[name] = cursor.value(kind)
        directory = [self._directory_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise BrokenModel(f"{self.path}: alignment {alignment!r} is not a positive number")
        data_start = -(-cursor.position // alignment) * alignment
        for name, shape, kind, offset in directory:
            self.tensors[name] = self._placed(name, shape, kind, data_start + offset)

    @staticmethod
    def _directory_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        return name, tuple(reversed(dimensions)), cursor.scalar("I"), cursor.scalar("Q")

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise UnsupportedModel(f"{self.path}: tensor {name} has the unknown type {kind}") from error
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        if len(shape) > _MOST_DIMENSIONS or math.prod(shape[-1:]) % block_elements:
            raise BrokenModel(f"{self.path} is damaged: tensor {name} in {quantization.name} has the shape {shape}")
        num_bytes = math.prod(shape) // block_elements * block_bytes
        if start + num_bytes > len(self._map):
            raise BrokenModel(f"{self.path} is cut short: tensor {name} ends after the file, download it again")
        return GgufTensor(name, shape, quantization, start, num_bytes)

    def dequantized(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, in its own memory. Raises KeyError for an unknown name, UnsupportedModel for a format
        that the `gguf` package cannot decode.
        """
        tensor = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.start)
        rows = data.reshape(*tensor.shape[:-1], -1)
        try:
            values = dequantize(rows, tensor.kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is stored as {tensor.kind.name}, which cannot be decoded; "
                "use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or a K quantization"
            ) from error
        return np.require(values.reshape(tensor.shape), np.float32, ["C", "W"])
