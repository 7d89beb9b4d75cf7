"""Devices by name, for plans made without having one."""

from __future__ import annotations

from dataclasses import dataclass

from radixfleet.settings import format_bytes, parse_bytes

_MIB = 1 << 20
_RESERVED_BYTES = 1 << 30
"""Estimate: what the driver keeps for itself and the CUDA context of one process, beside what NVML calls total."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a plan."""

    name: str
    total_bytes: int
    reserved_bytes: int
    """What no worker can use."""

    @property
    def usable_bytes(self) -> int:
        """What a worker may plan with."""
        return self.total_bytes - self.reserved_bytes

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.usable_bytes)})" if self.reserved_bytes else self.name


_TOTAL_MIB = {
    "T4-16": 15_360,
    "A10-24": 23_028,
    "L4-24": 23_034,
    "A100-40": 40_960,
    "L40S-48": 46_068,
    "H100-80": 81_559,
    "A100-80": 81_920,
    "H200-141": 143_771,
    "B200-180": 182_630,
}
"""Total memory as NVML (nvidia-smi) gives it; of the B200 what cudaMemGetInfo does."""

DEVICES = {name: Device(name, mib * _MIB, _RESERVED_BYTES) for name, mib in _TOTAL_MIB.items()}
"""By name, smallest first."""


def find_device(text: str) -> Device:
    """The device of a name ("H100-80", "h100-80gb", "H100" where there is just one) or of a size ("24GiB").

    Raises ValueError that lists the names.
    """
    name = text.upper().removesuffix("GB").rstrip(" -")
    if name in DEVICES:
        return DEVICES[name]
    alike = [device for key, device in DEVICES.items() if key.partition("-")[0] == name]
    if len(alike) == 1:
        return alike[0]
    try:
        size = parse_bytes(text)
    except ValueError:
        names = ", ".join(device.name for device in alike) if alike else ", ".join(DEVICES)
        raise ValueError(f"{text!r} is no device that is known here; name one of {names}, or a size: 24GiB") from None
    return Device(f"a device of {format_bytes(size)}", size, 0)
