"""Everything that needs a GPU, in one go, on one of them: the suites of tests/gpu and the CUDA cases of the others.

python -m tests.gpu.run              # less than five minutes; the exit code is that of pytest
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch


def main() -> int:
    """Run them; says what there is, and which attention packages."""
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: install a build of torch for CUDA", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}")
    tests = Path(__file__).parents[1]
    suites = [tests / "gpu", tests / "conformance", tests / "unit" / "worker" / "sampling"]
    return int(pytest.main(["-m", "gpu", "-q", "--timeout=240", *map(str, suites), *sys.argv[1:]]))


if __name__ == "__main__":
    raise SystemExit(main())
