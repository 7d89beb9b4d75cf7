"""Messages between the worker's processes as bytes: msgspec's msgpack, numpy arrays as typed raw memory, no pickle.

An array travels as a msgpack extension whose type number names its dtype, so that one of the wrong dtype is refused
by the decoder and never read as something else. Decoding copies an array once out of the message (about 1 us for 8,192
int32): msgpack aligns nothing, unaligned memory slows every later numpy operation, and torch wants writable memory.
All peers are processes of one machine, so byte order is the machine's own.
"""

from __future__ import annotations

from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from worker.core.messages import EngineMessage, FrontMessage, LoadFailed, Ready
from worker.core.step import RunnerAnswer, RunnerOrder

Buffer: TypeAlias = bytes | bytearray | memoryview

_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.int32),
    2: np.dtype(np.uint32),
    3: np.dtype(np.bool_),
    4: np.dtype(np.uint64),
    5: np.dtype(np.float32),
}
_EXTENSIONS = {dtype: code for code, dtype in _DTYPES.items()}

Array: TypeAlias = npt.NDArray[Any]


def _pack_array(value: object) -> msgspec.msgpack.Ext:
    """Encoder hook: one-dimensional arrays only, which is all that messages hold."""
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype not in _EXTENSIONS:
        raise TypeError(f"cannot send {type(value).__name__} {getattr(value, 'dtype', '')} between processes")
    return msgspec.msgpack.Ext(_EXTENSIONS[value.dtype], np.ascontiguousarray(value).data)


def _unpack_array(code: int, data: memoryview) -> Array:
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise ValueError(f"unknown msgpack extension {code}")
    return np.frombuffer(data, dtype=dtype).copy()


def _check_array(annotation: object, value: object) -> Array:
    """Decoder hook: `annotation` is the field's `NDArray[...]`, whose dtype the array must have."""
    dtype = _annotated.get(id(annotation))
    if dtype is None:
        _, dtype_annotation = get_args(annotation)
        dtype = _annotated[id(annotation)] = np.dtype(get_args(dtype_annotation)[0])
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        raise ValueError(f"expected an array of {dtype}, got {getattr(value, 'dtype', type(value).__name__)}")
    return value


_annotated: dict[int, np.dtype[Any]] = {}
"""By id of the annotation, which its decoder, made below, keeps alive: hashing one takes a fifth of a decode."""


def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_check_array, ext_hook=_unpack_array)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_front_messages = _decoder(FrontMessage)
_engine_messages = _decoder(EngineMessage)
_load_outcomes = _decoder(Ready | LoadFailed)
_orders = _decoder(RunnerOrder)
_answers = _decoder(RunnerAnswer)


def encode(message: FrontMessage | EngineMessage | RunnerOrder | RunnerAnswer) -> bytes:
    """The bytes of any message of the worker. Raises TypeError on an array that no message holds."""
    return _encoder.encode(message)


def decode_front_message(data: Buffer) -> FrontMessage:
    """What the engine hears from the front. This and the others raise msgspec.ValidationError on anything else."""
    message: FrontMessage = _front_messages.decode(data)
    return message


def decode_engine_message(data: Buffer) -> EngineMessage:
    """What the front hears from the engine."""
    message: EngineMessage = _engine_messages.decode(data)
    return message


def decode_load_outcome(data: Buffer) -> Ready | LoadFailed:
    """What the engine hears first from a runner."""
    message: Ready | LoadFailed = _load_outcomes.decode(data)
    return message


def decode_order(data: Buffer) -> RunnerOrder:
    """What a runner hears from the engine."""
    order: RunnerOrder = _orders.decode(data)
    return order


def decode_answer(data: Buffer) -> RunnerAnswer:
    """What the engine hears from a runner once it has loaded."""
    answer: RunnerAnswer = _answers.decode(data)
    return answer
