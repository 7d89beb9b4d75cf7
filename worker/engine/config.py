"""What an engine is made from: plain data, handed to the child processes as JSON over a pipe."""

from __future__ import annotations

import os

import msgspec
import structlog

from radixfleet.clock import Clock
from radixfleet.errors import RadixfleetError
from worker.memory.plan import MemoryPlanError
from worker.runner.protocol import Runner
from worker.runner.sim import SimRunner, SimRunnerConfig
from worker.runner.torch_config import TorchRunnerConfig
from worker.scheduling.limits import Order

log = structlog.get_logger(__name__)

_FOR_PEOPLE = (RadixfleetError, MemoryPlanError, ValueError, OSError, MemoryError)
_MALLOC_BYTES = 1 << 30
RUNNER_ENVIRONMENT = {
    # Threads that spin at OpenMP's barriers take the core from the very thread they wait for, when cores are shared:
    # two-thread steps were seen to go from 20 ms to 900 ms.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "GOMP_SPINCOUNT": "0",
    # Keep the memory of big temporaries: giving it back and faulting it in again doubles the time of a padded gather.
    "MALLOC_MMAP_THRESHOLD_": str(_MALLOC_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(_MALLOC_BYTES),
    # On GPUs: steps of all sizes come in turn, and what is free is not to lie in pieces that fit none of them.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Engine, runner and how they are watched."""

    runner: SimRunnerConfig | TorchRunnerConfig
    overlap: bool = True
    """Plan the next step while the device computes the last one."""
    schedule_order: Order = "lpm"
    preempt: bool = False
    """With the order priority: retract running requests for waiting ones of higher priority."""
    log_level: str = "info"
    log_json: bool = False
    silent_s: float = 5.0
    """An engine whose loop says nothing for so long is FAILED, until it speaks. It speaks twice a second, however long
    its runner computes. So is one whose runner process has been stopped for so long, until that goes on."""
    stuck_s: float = 60.0
    """An engine that has work and ends no step for so long is FAILED, until it does. Longer than any honest step."""
    restart_stuck_s: float = 300.0
    """After so long it is killed and started again."""
    load_still_s: float = 300.0
    """A load whose processes neither compute nor read for so long hangs, on a file system that does not answer, say:
    they are killed and started again. One that goes on may take as long as it needs. Where the system does not tell
    what they read (macOS), none is taken to hang."""
    restart_backoff_s: float = 0.5
    """Wait before the first restart; doubled for each one that does not last, up to 30 s."""
    max_restarts: int = 5
    """Restarts in a row that do not last before the handle gives up."""
    stop_grace_s: float = 10.0
    """How long a stopping engine may take to settle what is in flight."""

    def runner_environment(self) -> dict[str, str]:
        """Environment of the runner process. What the operator has set there stays, but for the number of threads."""
        environment = RUNNER_ENVIRONMENT | dict(os.environ)
        if "PYTORCH_CUDA_ALLOC_CONF" in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:  # its older name
            del environment["PYTORCH_ALLOC_CONF"]
        if isinstance(self.runner, TorchRunnerConfig):
            environment["OMP_NUM_THREADS"] = str(self.runner.num_threads)
        return environment


def make_runner(config: SimRunnerConfig | TorchRunnerConfig, clock: Clock) -> Runner:
    """The runner that a configuration describes, not loaded yet. Torch is imported only for a torch runner."""
    if isinstance(config, SimRunnerConfig):
        return SimRunner(config, clock)
    # Here, because torch takes seconds to import and the engine process must not have it.
    from worker.runner.torch_runner import make_torch_runner

    return make_torch_runner(config, clock)


def load_failure(error: Exception) -> str:
    """What an operator reads when `Runner.load` raised `error`. Logs what such a message does not tell.

    Errors that are written for people (no such file, does not fit, ...) speak for themselves. Any other is a bug: its
    traceback is logged.
    """
    if isinstance(error, _FOR_PEOPLE) and str(error):
        log.debug("cannot load", exc_info=error)
        return str(error)
    log.error("the runner crashed while it loaded", exc_info=error)
    return f"{type(error).__name__}: {error}"
