"""What to change when memory runs out: a table from the stage, and what held it, to advice that points the right way.

    stage     what ran short                           what helps                        what would not
    load      the device, for the weights alone        more memory, a smaller model      any share or chunk setting
              the device, while they were read         the same, or what else runs there any share or chunk setting
    start     KV pool, held by mem_fraction_static     a larger mem_fraction_static      a smaller chunk
              KV pool, held by the activation peak     a smaller chunk, fewer requests   a larger mem_fraction_static
              KV pool, held by CUDA graphs             none of them, fewer requests      a larger mem_fraction_static
              KV pool, held by max_total_tokens        a larger max_total_tokens         more memory
              KV pool, on a device too small           more memory, a shorter context    any share or chunk setting
              the device, in the largest step          a smaller chunk, fewer requests   any share
              the device, for the pool as planned      what else runs there, a smaller   a smaller chunk
                                                       share
    prefill   the device, in a step with chunks        a smaller chunk, a smaller share  fewer requests
    decode    the device, in a step without            fewer requests, a smaller share   a smaller chunk
    sampling  the device, over the vocabulary          fewer requests, a smaller share   a smaller chunk
    kv_full   KV pages, while requests run             fewer requests, more KV           a bound that does not bind
              KV pages, for one request alone          more KV, a shorter request        fewer requests

"More KV" is what raises the bound that the pool's size comes from: see `MORE_KV`.

Pure: stage and numbers in, text out. The plan of memory raises it; the engine logs it and puts it into statuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """When memory ran short."""

    LOAD = "load"
    START = "start"
    PREFILL = "prefill"
    DECODE = "decode"
    SAMPLING = "sampling"
    KV_FULL = "kv_full"


class Bound(StrEnum):
    """What held it: which of a stage's rows is meant, where it has several."""

    FRACTION = "mem_fraction_static"
    ACTIVATIONS = "activation peak"
    GRAPHS = "CUDA graphs"
    CAP = "max_total_tokens"
    DEVICE = "device memory"
    ALLOCATION = "allocation"
    """Not the plan: the device refused what should have been there."""
    LARGEST_STEP = "largest step"
    ONE_REQUEST = "one request"


@dataclass(frozen=True, slots=True)
class Shortage:
    """The numbers of one shortage: bytes, but tokens at KV_FULL. None where nobody knows."""

    needed: int | None
    available: int | None
    bound: Bound | None = None
    enough: str = ""
    """The value of the advised setting that would do, where it can be told."""
    kv_bound: Bound = Bound.FRACTION
    """At KV_FULL: what the pool's size comes from."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What happened and what to do about it."""

    text: str
    """One or two sentences with the numbers, for a log line or a status."""
    setting: str
    """The setting, or the request's parameter, to change first, as it is named in a settings file."""


_MORE_MEMORY = (
    "Use a device with more memory (--device-memory where its size is a setting), a smaller model or a quantized one"
)
MORE_KV = {
    Bound.FRACTION: "a larger --mem-fraction-static or --device-memory",
    Bound.ACTIVATIONS: "a smaller --chunked-prefill-size or a larger --device-memory",
    Bound.CAP: "a larger --max-total-tokens, which is what bounds it",
}
"""What makes a KV pool larger, by what bounds it; to raise another bound changes nothing."""

_TABLE: dict[tuple[Stage, Bound | None], tuple[str, str]] = {
    (Stage.LOAD, None): (
        "device_memory",
        "The weights alone need {needed} and the device has {available}. "
        f"{_MORE_MEMORY}; no other setting can make room.",
    ),
    (Stage.LOAD, Bound.ALLOCATION): (
        "device_memory",
        "The device ran out of memory while the weights were read{numbers}. End what else uses it. "
        f"{_MORE_MEMORY}; no other setting can make room.",
    ),
    (Stage.START, Bound.FRACTION): (
        "mem_fraction_static",
        "The KV pool needs at least {needed} and its share is {available}. "
        "Raise --mem-fraction-static{enough}: the activations leave room for it.",
    ),
    (Stage.START, Bound.ACTIVATIONS): (
        "chunked_prefill_size",
        "The KV pool needs at least {needed} and the activations of the largest step leave "
        "{available}. Lower --chunked-prefill-size, then --max-running-requests.",
    ),
    (Stage.START, Bound.GRAPHS): (
        "cuda_graphs",
        "The KV pool needs at least {needed}; the activations of the largest step and CUDA graphs leave {available}, "
        "and without the graphs it fits. Use --no-cuda-graphs, or lower --max-running-requests.",
    ),
    (Stage.START, Bound.CAP): (
        "max_total_tokens",
        "The KV pool needs at least {needed} and --max-total-tokens allows {available}. "
        "Raise --max-total-tokens{enough}.",
    ),
    (Stage.START, Bound.DEVICE): (
        "device_memory",
        "The KV pool needs at least {needed} and the weights leave {available}. "
        f"{_MORE_MEMORY}, or a smaller --context-length.",
    ),
    (Stage.START, Bound.LARGEST_STEP): (
        "chunked_prefill_size",
        "The largest step, tried at start, ran out of device memory{numbers}. "
        "Lower --chunked-prefill-size, then --max-running-requests.",
    ),
    (Stage.START, Bound.ALLOCATION): (
        "mem_fraction_static",
        "The device refused the KV pool that was planned{numbers}. "
        "End what else uses the device, or lower --mem-fraction-static.",
    ),
    (Stage.PREFILL, None): (
        "chunked_prefill_size",
        "A prefill step ran out of device memory{numbers}. "
        "Lower --chunked-prefill-size, or lower --mem-fraction-static to leave the activations more.",
    ),
    (Stage.DECODE, None): (
        "max_running_requests",
        "A decode step ran out of device memory{numbers}. "
        "Lower --max-running-requests, or lower --mem-fraction-static to leave the activations more.",
    ),
    (Stage.SAMPLING, None): (
        "max_running_requests",
        "Sampling ran out of device memory{numbers}: it grows with the requests in a step and the vocabulary. "
        "Lower --max-running-requests, or lower --mem-fraction-static to leave the activations more.",
    ),
    (Stage.KV_FULL, None): (
        "max_running_requests",
        "The KV pool of {available} is full and the running requests need {needed}. Run fewer at once "
        "(--max-running-requests) or on more workers, or give the pool more: {more_kv}.",
    ),
    (Stage.KV_FULL, Bound.ONE_REQUEST): (
        "max_new_tokens",
        "The KV pool of {available} is too small for one request, which runs alone and needs {needed}. "
        "Lower its max_new_tokens or shorten its prompt, or give the pool more: {more_kv}.",
    ),
}


def advise(stage: Stage, shortage: Shortage) -> Advice:
    """The advice for a shortage at a stage. Where a stage has several rows, `shortage.bound` must say which."""
    setting, text = _TABLE[stage, shortage.bound]
    size = format_tokens if stage is Stage.KV_FULL else format_bytes
    needed, available = (
        "an unknown amount" if number is None else size(number) for number in (shortage.needed, shortage.available)
    )
    return Advice(
        text=text.format(
            needed=needed,
            available=available,
            more_kv=MORE_KV[shortage.kv_bound],
            enough=f" to {shortage.enough} or more" if shortage.enough else "",
            numbers="" if shortage.needed is None else f": it asked for {needed} and {available} were free",
        ),
        setting=setting,
    )


def format_tokens(num_tokens: int) -> str:
    """A number of tokens for people: "4,096 tokens"."""
    return f"{num_tokens:,} tokens"


def format_bytes(num_bytes: int) -> str:
    """A size for people: "512 B", "1.50 MiB", "139.00 GiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
