"""The Triton kernels as GPUs run them: compiled for two generations, which needs no GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SMALLEST_SHARED_BYTES = 101_376
"""What a block may have on the GPUs with the least of it (compute capability 8.6 and 8.9)."""
SPILLED_BYTES = 16
"""Of each thread's, that went to memory for want of registers: a few bytes cost nothing, hundreds most of the speed."""
COMPILE = """
import re
import subprocess
import tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from worker.model.triton_kernels import add_and_norm, gate, rotate_and_keep
from worker.runner.attention.triton_kernels import attend_blocks, combine_splits
from worker.sampling.triton_kernels import find_thresholds

def compile_for(kernel, constants, capability, dtype="*bf16"):
    kinds = dict.fromkeys(("queries", "keys", "values", "out"), dtype)
    kinds |= {"scale": "fp32", "scores": "*fp32", "shares": "*fp64", "thresholds": "*fp32", "vocab_size": "i32",
              "epsilon": "fp32", "slots": "*i64"}
    kinds |= dict.fromkeys(
        ("hidden", "added", "weight", "normed", "heads", "cosine", "signed_sine", "query_norm", "key_norm", "gate_up"),
        "*bf16",
    )
    signature = {
        name: "constexpr" if name in constants
        else kinds.get(name) or ("*fp32" if name.startswith("part_") else "i32" if name.endswith("stride") else "*i32")
        for name in kernel.arg_names
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": 4, "num_stages": 2}
    target = GPUTarget("cuda", capability, 32)
    # As tensors lie that torch has allocated; slots may be any row of a recorded step's inputs.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" and name != "slots" or name.endswith("stride") and name != "pages_stride"
    }
    return triton.compile(ASTSource(kernel, signature, values, aligned), target=target, options=options)

def tell(*given):
    compiled = compile_for(*given)
    narrow = len(re.findall(r"(?:ld|st)\\.global(?!\\S*v4)", compiled.asm["ptx"]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(compiled.metadata.shared, narrow, re.search(r"STACK:(\\d+)", used)[1])

head = {"HEAD_DIM": 64, "BLOCK_D": 64}
block = head | {"GROUP": 3, "PAGE_SIZE": 16, "BLOCK_N": 64}
tell(attend_blocks, block | {"BLOCK_Q": 21, "BLOCK_M": 64, "NUM_SPLITS": 1}, 80)
tell(attend_blocks, block | {"BLOCK_Q": 1, "BLOCK_M": 16, "NUM_SPLITS": 8}, 90)
tell(combine_splits, head | {"NUM_SPLITS": 8}, 90)
tell(find_thresholds, {"BLOCK": 2048}, 80)
for head_dim, rows, columns in ((64, 32, 32), (128, 32, 16), (256, 16, 16)):  # of float32
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "GROUP": 4, "PAGE_SIZE": 16, "BLOCK_N": columns}
    tell(attend_blocks, sizes | {"BLOCK_Q": rows // 4, "BLOCK_M": rows, "NUM_SPLITS": 1}, 90, "*fp32")
large = {"HEAD_DIM": 128, "BLOCK_D": 128, "GROUP": 4, "PAGE_SIZE": 16, "BLOCK_N": 64}
tell(attend_blocks, large | {"BLOCK_Q": 16, "BLOCK_M": 64, "NUM_SPLITS": 1}, 90)
for capability in (80, 90):
    tell(add_and_norm, {"SIZE": 4096, "BLOCK": 4096, "HAS_ADDED": True}, capability)
    tell(gate, {"SIZE": 12_288, "BLOCK": 1024}, capability)
    turned = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_HALF": 64, "BLOCK_HEADS": 16}
    tell(rotate_and_keep, turned | {"HAS_NORMS": True}, capability)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is for Linux")
def test_the_kernels_compile_for_ampere_and_hopper_and_fit_small_gpus(tmp_path: object) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr
    shared, narrow, stack = zip(*(map(int, line.split()) for line in run.stdout.splitlines()), strict=True)
    assert len(shared) == 14
    assert max(stack) <= SPILLED_BYTES
    # Of what streams through a layer, each thread moves 16 bytes at a time; but a slot is one number.
    assert narrow[-6:] == (0, 0, 1) * 2
    assert max(shared) <= SMALLEST_SHARED_BYTES
