"""Generates the Python code of proto/radixfleet/v1/*.proto, beside the .proto files: `make proto`.

The generated code is committed, so that using Radixfleet needs no compiler. Its version is that of the grpcio-tools and
mypy-protobuf that constraints.txt pins; what it demands at run time stands in pyproject.toml as the least versions of
grpcio and protobuf. A test generates it again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

SOURCE_ROOT = Path(__file__).resolve().parent
PACKAGE = Path("radixfleet/v1")


def generate(output_root: Path) -> None:
    """Write the code of every .proto under `output_root`/radixfleet/v1. Raises RuntimeError when the compiler fails."""
    plugins = [
        f"--plugin={name}={Path(sys.executable).parent / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    outputs = [f"--{kind}_out={output_root}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    files = sorted(str(path.relative_to(SOURCE_ROOT)) for path in (SOURCE_ROOT / PACKAGE).glob("*.proto"))
    status = protoc.main(["protoc", f"-I{SOURCE_ROOT}", *plugins, *outputs, *files])
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")


if __name__ == "__main__":
    generate(SOURCE_ROOT)
