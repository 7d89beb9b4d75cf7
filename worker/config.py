"""Settings of the worker process, each declared once: see `radixfleet.settings`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from radixfleet.access_settings import (
    AdminToken,
    ApiKeys,
    IsolateClients,
    TlsCa,
    TlsCert,
    TlsClientCa,
    TlsKey,
    TlsPeerName,
)
from radixfleet.address import is_host_port
from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.settings import ByteSize, CommaList, LogLevel, ProcessSettings

DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
SchedulePolicy: TypeAlias = Literal["lpm", "fcfs", "priority"]
AttentionName: TypeAlias = Literal["auto", "flash", "triton", "cpu", "sdpa"]
RunnerKind: TypeAlias = Literal["torch", "sim"]

_LEAST_POOL_PAGES = 2


class WorkerSettings(ProcessSettings):
    """What an operator may choose."""

    model_config = SettingsConfigDict(env_prefix="RADIXFLEET_WORKER_")

    model: str = Field(
        min_length=1, description="Model to serve: a Hugging Face directory, a .gguf file, or demo (SmolLM2-135M)."
    )
    served_model_name: str | None = Field(
        None, description="Name by which clients ask for the model; default: the name of the directory or file."
    )
    context_length: int | None = Field(
        None, ge=2, description="Longest prompt and completion together, in tokens; default: the model's own limit."
    )
    default_max_new_tokens: int = Field(
        256, ge=1, description="max_new_tokens of requests that set none; less where the context leaves less."
    )

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(7080, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    metrics_port: int = Field(7081, ge=0, le=65535, description="Prometheus port; 0 takes a free one.")
    address_file: Path | None = Field(
        None,
        description="Holds host:port from when the server listens until it ends; for scripts that start with --port 0.",
    )
    max_message_bytes: ByteSize = Field(
        64 * 1024**2,
        ge=1024**2,
        description="Largest gRPC message: 64MiB, say; a prompt of a million tokens needs 4 MB.",
    )
    worker_id: str | None = Field(
        None, min_length=1, max_length=128, description="Name in the fleet; default: host name and port."
    )
    routers: CommaList = Field(
        (), description="host:port of routers to register with. They may come up later, and be restarted."
    )
    advertise_address: str | None = Field(
        None, description="host:port at which routers reach this worker; default: host and port it listens on."
    )

    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    tls_client_ca: TlsClientCa = None
    tls_peer_name: TlsPeerName = None
    api_keys: ApiKeys = ()
    admin_token: AdminToken = None
    isolate_clients: IsolateClients = False

    runner: RunnerKind = Field(
        "torch",
        description="torch runs the model; sim imitates a GPU's times, makes up the tokens, and refuses grammars.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; auto takes a GPU if any.")
    dtype: DType = Field(
        "auto", description="Type of weights and KV cache; auto takes bfloat16 where that is the fastest."
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads that compute on a CPU; default: its cores. With several workers: cores / workers.",
    )
    attention: AttentionName = Field(
        "auto",
        description="For GPUs, flash is FlashAttention, triton our own kernels; for CPUs, cpu is our kernels in C; "
        "sdpa is torch's, for any device. auto takes the first that works. Deterministic inference: not flash.",
    )
    enable_deterministic_inference: bool = Field(
        default=False,
        description="The same prompt and seed give the same tokens and log probabilities to the last bit, whatever "
        "else runs and is cached. Proven on CPUs. Off, tokens that are almost equally likely may change places.",
    )
    inline: bool = Field(default=False, description="Run front, engine and runner in one process, for debugging.")
    overlap: bool = Field(default=True, description="Plan the next step while the device computes this one.")
    cuda_graphs: bool = Field(
        default=True,
        description="On a GPU, replay steps of decodes from recordings, which are made and checked at start.",
    )

    device_memory: ByteSize | None = Field(
        None,
        ge=1024**2,
        description="Memory to plan with: 4GiB, say; default: what is free on a GPU, half of the machine on a CPU.",
    )
    mem_fraction_static: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="The KV pool's share of the memory left after the weights; activations get the rest.",
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="Upper bound of the KV pool, in tokens; two pages or more."
    )
    page_size: int = Field(
        16,
        ge=1,
        le=BLOCK_TOKENS,
        description="Tokens in a page of the KV pool; 1, 2, 4, 8, 16, 32 or 64. Prefixes are "
        "shared by whole pages: 1 shares every token, 16 is faster on most devices.",
    )
    chunked_prefill_size: int | None = Field(
        None,
        ge=1,
        description="Prompt tokens computed in one step; default: 1024 on CPUs, else by the device's memory.",
    )
    max_running_requests: int | None = Field(
        None, ge=1, le=4096, description="Requests that run at once; default: by the size of the KV pool."
    )
    schedule_policy: SchedulePolicy = Field(
        "lpm",
        description="Which request leaves the queue first: lpm, the one with the longest cached prefix (with aging); "
        "fcfs, the oldest; priority, the highest.",
    )
    preempt: bool = Field(
        default=False,
        description="With --schedule-policy priority: where a request of higher priority finds no room, running ones "
        "are retracted for it, and continued later.",
    )

    drain_grace_s: float = Field(
        30.0, ge=0, le=86400, description="On SIGTERM, how long running requests may go on before they are cut."
    )
    log_level: LogLevel = Field("info", description="Lowest level that is logged; requests are logged at debug.")
    log_json: bool = Field(default=False, description="Log one JSON object a line.")

    @field_validator("page_size")
    @classmethod
    def _divides_a_block(cls, page_size: int) -> int:
        if BLOCK_TOKENS % page_size:
            raise ValueError(f"must divide {BLOCK_TOKENS}: choose 1, 2, 4, 8, 16, 32 or 64; got {page_size}")
        return page_size

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"must be auto, cpu, cuda or cuda:N; got {device!r}")
        return device

    @field_validator("advertise_address")
    @classmethod
    def _can_be_dialled(cls, address: str | None) -> str | None:
        if address is not None and not is_host_port(address):
            raise ValueError(f"must be host:port; got {address!r}")
        return address

    @field_validator("routers")
    @classmethod
    def _can_be_called(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            if not is_host_port(address):
                raise ValueError(f"must be host:port of a router's gRPC port; got {address!r}")
        return addresses

    @model_validator(mode="after")
    def _holds_a_request(self) -> Self:
        # With pages of one token: a token of a prompt, and one to answer.
        least = _LEAST_POOL_PAGES * self.page_size
        if self.max_total_tokens is not None and self.max_total_tokens < least:
            raise ValueError(
                f"--max-total-tokens {self.max_total_tokens} leaves no room for a prompt and its answer: "
                f"set it to {least} (two pages) or more, or leave it out"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name by which clients ask for the model."""
        return self.served_model_name or Path(os.path.normpath(self.model)).name.removesuffix(".gguf")


__all__ = ["AttentionName", "DType", "RunnerKind", "SchedulePolicy", "WorkerSettings"]
