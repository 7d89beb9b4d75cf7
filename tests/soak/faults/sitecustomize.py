"""Steps that fail, in the runner processes of a soak: Python imports this at start where it lies on PYTHONPATH.

With SOAK_FAULTS=DIRECTORY in the environment, one step in `_OUT_OF_MEMORY` has no memory (half of them only in
sampling), one in `_ERROR` breaks as a whole, and one in `_NAN` gives a sequence NaN. Each is noted by a line in a file
of the directory. The product knows nothing of it: its classes are changed when they are imported.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_OUT_OF_MEMORY, _ERROR, _NAN = 40, 200, 100
_SAMPLER = "worker.runner.step_sampler"


class Faults:
    """Decides what fails, and notes it."""

    def __init__(self, directory: str) -> None:
        self._random = random.Random(os.getpid())
        self._file = Path(directory) / str(os.getpid())
        self._served = False

    def happens(self, kind: str, one_in: int) -> bool:
        """Whether it does, this time. Never while the runner measures what steps take."""
        if not self._served or self._random.randrange(one_in):
            return False
        with self._file.open("a") as file:
            file.write(f"{kind}\n")
        return True

    def served(self) -> None:
        """A step has come to its end: it is not the first, which is measured."""
        self._served = True


def _patch_sampler(module: Any, faults: Faults) -> None:
    import torch

    begin, draw, settle = module.StepSampler.begin, module.StepSampler.draw, module.StepSampler.settle

    def faulty_begin(self: Any, plan: Any) -> Any:
        if faults.happens("out of memory", 2 * _OUT_OF_MEMORY):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        if faults.happens("error", _ERROR):
            raise RuntimeError("a kernel broke")
        return begin(self, plan)

    def faulty_draw(self: Any, *arguments: Any) -> Any:
        if faults.happens("out of memory", 2 * _OUT_OF_MEMORY):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return draw(self, *arguments)

    def faulty_settle(self: Any, drawn: Any) -> Any:
        sampled = settle(self, drawn)
        if len(drawn.begun.sampling) and faults.happens("nan", _NAN):
            sampled.failed[drawn.begun.sampling[0]] = True
        faults.served()
        return sampled

    module.StepSampler.begin = faulty_begin
    module.StepSampler.draw = faulty_draw
    module.StepSampler.settle = faulty_settle


class _Finder:
    """Changes one module when it is imported."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name != _SAMPLER:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            _patch_sampler(module, self._faults)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


if "SOAK_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder(Faults(os.environ["SOAK_FAULTS"])))  # type: ignore[arg-type]
