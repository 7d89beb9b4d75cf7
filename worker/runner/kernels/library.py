"""The compiled kernels as Python calls them. Structures and functions are those of the header files, in their order."""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p

from torch import Tensor

from worker.runner.kernels.compiler import KernelsUnavailable, load_compiled


class Batch(Structure):
    """rf_batch"""

    _fields_ = (
        ("num_sequences", c_int32),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("offsets", c_void_p),
        ("table_offsets", c_void_p),
        ("table", c_void_p),
    )


class AttentionShape(Structure):
    """rf_attention_shape"""

    _fields_ = (("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32), ("is_bf16", c_int32))


class AttentionLayer(Structure):
    """rf_attention_layer"""

    _fields_ = (
        ("q", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("kv_stride", c_int64),
        ("out_stride", c_int64),
    )


class LinearWeight(Structure):
    """rf_linear"""

    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("out_features", c_int32), ("in_features", c_int32))


class Operands(Structure):
    """rf_operands"""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("num_rows", c_int32),
        ("output", c_int32),
    )


class Layer(Structure):
    """rf_layer"""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", LinearWeight),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", LinearWeight),
        ("mlp_norm", c_void_p),
        ("gate_up", LinearWeight),
        ("down", LinearWeight),
    )


class Model(Structure):
    """rf_model"""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("shape", AttentionShape),
        ("norm_epsilon", c_float),
        ("embedding", c_void_p),
        ("layers", POINTER(Layer)),
        ("cosine", c_void_p),
        ("signed_sine", c_void_p),
    )


class Step(Structure):
    """rf_step"""

    _fields_ = (
        ("batch", Batch),
        ("num_tokens", c_int32),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("workspace", c_void_p),
        ("hidden", c_void_p),
    )


class DrawOperands(Structure):
    """rf_drawing"""

    _fields_ = (
        ("logits", c_void_p),
        ("vocab_size", c_int32),
        ("num_rows", c_int32),
        ("rows", c_void_p),
        ("largest", c_void_p),
        ("temperature", c_void_p),
        ("least", c_void_p),
        ("streams", c_void_p),
        ("tokens", c_void_p),
    )


_FUNCTIONS = {
    "rf_init": (None, ()),
    "rf_features": (c_char_p, ()),
    "rf_have_vectors": (c_int32, ()),
    "rf_team_create": (c_void_p, (c_int32,)),
    "rf_team_destroy": (None, (c_void_p,)),
    "rf_team_size": (c_int32, (c_void_p,)),
    "rf_attention_plan_create": (c_void_p, (POINTER(Batch), POINTER(AttentionShape), c_int32)),
    "rf_attention_plan_destroy": (None, (c_void_p,)),
    "rf_attend": (None, (c_void_p, c_void_p, POINTER(AttentionLayer))),
    "rf_prefer_large_pages": (None, (c_void_p, c_int64)),
    "rf_packed_bytes": (c_int64, (c_int32, c_int32)),
    "rf_pack": (None, (c_void_p, c_int32, c_int32, c_void_p)),
    "rf_apply": (None, (c_void_p, POINTER(LinearWeight), POINTER(Operands))),
    "rf_apply_largest": (None, (c_void_p, POINTER(LinearWeight), POINTER(Operands), c_void_p)),
    "rf_workspace_bytes": (c_int64, (c_void_p, POINTER(Model), c_int32)),
    "rf_draw": (None, (POINTER(DrawOperands),)),
    "rf_forward": (c_int32, (c_void_p, POINTER(Model), POINTER(Step))),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library, compiled if need be. Raises KernelsUnavailable."""
    library = load_compiled(lambda path: ctypes.CDLL(str(path)))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.rf_init()
    return library


class Kernels:
    """The library with a team of threads. Callers take turns; calls free the interpreter's lock."""

    def __init__(self, num_threads: int) -> None:
        """Raises KernelsUnavailable."""
        self.library = load_library()
        team = self.library.rf_team_create(num_threads)
        if not team:
            raise KernelsUnavailable("no memory for the threads of the kernels", "free memory, or give fewer threads")
        self.team: int = team
        # At the interpreter's end a thread may still compute: the team then ends with the process.
        weakref.finalize(self, self.library.rf_team_destroy, team).atexit = False

    def prefer_large_pages(self, memory: Tensor) -> None:
        """Asks the system for large pages for what is not touched yet of a tensor's memory; see pages.h."""
        self.library.rf_prefer_large_pages(memory.data_ptr(), memory.nbytes)

    @property
    def num_threads(self) -> int:
        """Threads of the team, the caller's included."""
        return int(self.library.rf_team_size(self.team))

    @property
    def features(self) -> str:
        """What of the CPU is used, in a word."""
        return str(self.library.rf_features().decode())

    @property
    def have_vectors(self) -> bool:
        """Whether the kernels compute by vector instructions."""
        return bool(self.library.rf_have_vectors())
