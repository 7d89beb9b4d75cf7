"""The errors of Radixfleet, drawn as a tree, and nothing about how they travel (`status` maps them to gRPC's).

    RadixfleetError
    ├── InvalidRequest        the client must change the request              INVALID_ARGUMENT
    ├── UnknownModel          no such model here                              NOT_FOUND
    ├── UnknownWorker         no such worker in the fleet                     NOT_FOUND
    ├── Unauthenticated       no key, or a wrong one                          UNAUTHENTICATED
    ├── PermissionDenied      a key that is not enough                        PERMISSION_DENIED
    ├── Overloaded            a queue, a pool or a client's limit is full      RESOURCE_EXHAUSTED + RetryInfo
    ├── Unavailable           loading, draining, or no worker left            UNAVAILABLE + RetryInfo
    │   └── Unreachable       nothing answers, or the connection broke        (made by the caller, never sent)
    ├── DeadlineExceeded      the client's deadline passed                    DEADLINE_EXCEEDED
    ├── Cancelled             the client went away                            CANCELLED
    └── InternalError         our own fault                                   INTERNAL

`str(error)` is the client's message: it says what to do and names no internals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

_NAME_CHARACTERS = 100
"""Of a name that a client made up, and that an error repeats."""


class RadixfleetError(Exception):
    """Base of all errors that a client may see. Never raised itself."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status."""
    reason: ClassVar[str] = "INTERNAL"
    """ErrorInfo.reason: a constant that programs can compare."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, **metadata: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When trying again can help; becomes RetryInfo."""
        self.metadata = metadata
        """Becomes ErrorInfo.metadata: the numbers behind the message."""


class InvalidRequest(RadixfleetError):
    """The request itself is wrong. `field` is the path of the field at fault, as the .proto names it."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str = "", **metadata: str) -> None:
        super().__init__(message, retry_after_s=None, **metadata)
        self.field = field


class UnknownModel(RadixfleetError):
    """No worker serves the model that was asked for."""

    code = "NOT_FOUND"
    reason = "UNKNOWN_MODEL"


class UnknownWorker(RadixfleetError):
    """The fleet has no such worker."""

    code = "NOT_FOUND"
    reason = "UNKNOWN_WORKER"


class Unauthenticated(RadixfleetError):
    """The call carries no valid key."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(RadixfleetError):
    """The key is known, and does not allow this."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class Overloaded(RadixfleetError):
    """A queue or a pool is full."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class Unavailable(RadixfleetError):
    """Nobody can take the request now."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class Unreachable(Unavailable):
    """Nothing answers at the address, or what did is gone. Made by the caller, of what happened to its call."""


class DeadlineExceeded(RadixfleetError):
    """The deadline passed before the work was done."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class Cancelled(RadixfleetError):
    """The client cancelled, or went away."""

    code = "CANCELLED"
    reason = "CANCELLED"


class InternalError(RadixfleetError):
    """A fault of our own."""

    code = "INTERNAL"
    reason = "INTERNAL"


BY_REASON: dict[str, type[RadixfleetError]] = {
    kind.reason: kind
    for kind in (
        InvalidRequest,
        UnknownModel,
        UnknownWorker,
        Unauthenticated,
        PermissionDenied,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        InternalError,
    )
}
"""To turn a received ErrorInfo back into the error."""


def unknown_model(name: str, served: Sequence[str]) -> UnknownModel:
    """No model is called `name`; those in `served` are. A long name is cut, so that these are seen behind it."""
    shown = name if len(name) <= _NAME_CHARACTERS else f"{name[:_NAME_CHARACTERS]}..."
    return UnknownModel(f"no model is called {shown!r}; served are {', '.join(served)}")
