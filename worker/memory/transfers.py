"""Between arrays of the host and tensors of the device, without waiting. For runners: the rest here has no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of the array on the device: what is launched after it sees it, and the caller waits for nothing.

    From pageable memory a copy to a GPU waits for all that runs there. From pinned memory it does not, and torch's
    allocator of such memory gives it to nobody else before the copy is done: that is the barrier which keeps the host
    from overwriting what a launched step is still to read.
    """
    return _sent(np.array(array), device)  # a plan's arrays are read-only, which torch does not know


def upload_indices(array: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    """The same as int64, which torch indexes by."""
    return _sent(array.astype(np.int64), device)


def _sent(copy: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(copy)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def download(tensor: Tensor) -> Tensor:
    """The tensor on the host; of a GPU's, a copy on its way: to be read once the device has passed what follows."""
    if tensor.device.type == "cuda":
        arriving = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return arriving.copy_(tensor, non_blocking=True)
    return tensor


def still_computes(device: torch.device) -> bool:
    """Whether anything does: after some errors of a kernel (an illegal address) all that follows on a GPU fails."""
    try:
        return bool(torch.ones(1, device=device).add(1).item() == 2)
    except RuntimeError:
        return False
