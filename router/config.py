"""Settings of the router process, each declared once: see `radixfleet.settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, SecretStr, field_validator
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
    secret_text,
)
from radixfleet.settings import ByteSize, CommaList, LogLevel, ProcessSettings
from router.worker_address import check_worker_address

PolicyName: TypeAlias = Literal[
    "min_cost", "sglang", "linear", "power_of_two", "least_load", "round_robin", "random", "prefix_hash"
]

EngineApiKey: TypeAlias = Annotated[SecretStr | None, BeforeValidator(secret_text)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=86400)]


class RouterSettings(ProcessSettings):
    """What an operator may choose."""

    model_config = SettingsConfigDict(env_prefix="RADIXFLEET_ROUTER_")

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(7070, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    metrics_port: int = Field(7071, ge=0, le=65535, description="Prometheus port; 0 takes a free one.")
    http_port: int = Field(
        7072,
        ge=-1,
        le=65535,
        description="Port of the OpenAI-compatible HTTP API and of the console; 0 takes a free one, -1 serves neither.",
    )
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="Router processes that share the ports. More than one helps where a router keeps a core busy while "
        "others idle: at thousands of requests/s, or with long texts to tokenize. Connections are spread over them.",
    )
    address_file: Path | None = Field(
        None,
        description="Holds host:port from when the server listens until it ends; for scripts that start with --port 0. "
        "The address of HTTP goes into the file with .http behind its name.",
    )
    max_message_bytes: ByteSize = Field(
        64 * 1024**2,
        ge=1024**2,
        description="Largest gRPC message and HTTP body: 64MiB, say; a prompt of a million tokens needs 4 MB.",
    )

    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    tls_client_ca: TlsClientCa = None
    tls_peer_name: TlsPeerName = None
    api_keys: ApiKeys = ()
    admin_token: AdminToken = None
    isolate_clients: IsolateClients = False
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt that is taken, in tokens; default: what the model's context allows."
    )
    max_client_requests_per_s: float | None = Field(
        None, gt=0, le=1e6, description="Requests that a client (a key; without keys, a host) may send a second."
    )
    max_client_requests: int | None = Field(
        None, ge=1, le=1_000_000, description="Requests of a client that may run at once; more are refused."
    )

    workers: CommaList = Field(
        (),
        description="host:port of workers, and of engines that speak SGLang's or vLLM's gRPC; http://host:port[#MODEL] "
        "of servers with OpenAI's API. They may be down or still loading, and others may register later.",
    )
    engine_api_key: EngineApiKey = Field(
        None, description="Key for the servers with OpenAI's API among --workers, or @FILE that holds it."
    )
    tokenizers: CommaList = Field(
        (),
        description="MODEL=DIRECTORY, for models that only servers with OpenAI's API serve: with its tokenizer "
        "the router counts in the model's own tokens. Without it, prompts are sent as text.",
    )
    heartbeat_timeout_s: Seconds = Field(
        10.0,
        description="A worker that says nothing for this long gets no requests until it speaks again; those that it "
        "runs are sent elsewhere, or fail.",
    )
    connect_timeout_s: Seconds = Field(
        5.0, description="How long a worker may take to answer a question about itself before it is dialled again."
    )

    policy: PolicyName = Field(
        "min_cost",
        description="How a worker is chosen; router/README.md explains them, `radixfleet lab` compares them.",
    )
    max_queued_requests: int = Field(
        4096,
        ge=0,
        le=1_000_000,
        description="Requests of a model that may wait here while all workers are busy; 0: they wait in the workers.",
    )
    lease_s: Seconds = Field(
        10.0, description="A booking made by Fleet.Route ends after this time unless the worker saw the request."
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that turn text into tokens.")

    link: bool = Field(
        default=True,
        description="Carry all requests to a worker over one stream, where it knows how; off: a gRPC call for each.",
    )
    max_retries: int = Field(
        1,
        ge=0,
        le=5,
        description="How often a request that failed before its first token is tried on another worker. With resume, "
        "how often in a row an answer goes on once more that was lost within 16 tokens of going on.",
    )
    retry_ratio: float = Field(
        0.1,
        ge=0,
        le=1,
        description="At most this share of requests is retried before the first token, so that retries cannot drown a "
        "fleet. Answers that go on elsewhere because the client asked for it (resume) do not count.",
    )
    breaker_failures: int = Field(
        5,
        ge=1,
        le=1000,
        description="After so many failures in a row (connections, answers that never came, wrong ones where another "
        "worker gave a right one) a worker gets no requests for --breaker-open-s.",
    )
    breaker_open_s: Seconds = Field(10.0, description="How long that lasts; then one request probes the worker.")

    console_prompts: bool = Field(
        default=False,
        description="Show in the console how the prompts of the hottest prefixes begin. They are users' own words.",
    )
    drain_grace_s: float = Field(
        30.0, ge=0, le=86400, description="On SIGTERM, how long running requests may go on before they are cut."
    )
    log_level: LogLevel = Field("info", description="Lowest level that is logged; requests are logged at info.")
    log_json: bool = Field(default=False, description="Log one JSON object a line.")

    @field_validator("workers")
    @classmethod
    def _can_be_dialled(cls, workers: tuple[str, ...]) -> tuple[str, ...]:
        for address in workers:
            check_worker_address(address)
        return workers
