"""fleet.yaml: the routers and the models of a fleet, validated before anything is started.

The same file drives a cluster (`radixfleet fleet apply`) and one machine (`radixfleet up --fleet`). Settings of routers
and workers pass through as they are, so whatever `radixfleet router --help` and `radixfleet worker --help` offer can be
set here; only what the fleet decides itself is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from radixfleet.membership import WORKER_SLOT
from radixfleet.settings import SettingsError, check, complaint, is_port, nearest, shown
from router.config import RouterSettings
from worker.config import WorkerSettings
from worker.model.sources import DEMO

HEAD = "node:__internal_head__"
"""Ray's resource of the head node."""
ROUTER_GROUP = "router"
NAMESPACE = "radixfleet"
"""Of all our actors, and of our keys in Ray's store."""
SUPERVISOR = "supervisor"
_PORT_STEP = 10
_LAST_PORT = 65_535
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_FLEET_DECIDES = frozenset({"worker_id", "routers", "address_file", "advertise_address", "served_model_name"})
_NEEDED = {"admin_token": "admin_token", "tls_cert": "tls_ca", "tls_ca": "tls_cert", "tls_client_ca": "tls_cert"}
"""By what one side has: what the other side needs then."""
_BOTH_DIAL = "routers and workers dial each other"
MAX_WORKERS = 10_000


def _divisible(amount: float) -> float:
    if amount > 1 and not amount.is_integer():
        raise ValueError("must be a whole number, or a part of one: Ray shares out no 1.5 of anything")
    return amount


Resources: TypeAlias = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_divisible)]]

EXAMPLE = (Path(__file__).parent / "example.yaml").read_text(encoding="utf-8")
"""A fleet.yaml with a comment on every key."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _bounds(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"min": value, "max": value}
    return value


class Bounds(_Part):
    """How many workers; between the two the load decides."""

    min: int = Field(ge=0, le=MAX_WORKERS)
    max: int = Field(ge=0, le=MAX_WORKERS)

    @model_validator(mode="after")
    def _ordered(self) -> Bounds:
        if self.min > self.max:
            raise ValueError(f"min must not be above max; got {self.min} and {self.max}")
        if self.max and not self.min:
            raise ValueError(
                "min must be at least 1: requests do not wait for a model without workers (0 alone parks it)"
            )
        return self

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}-{self.max}"


class Scaling(_Part):
    """When the number of workers changes. Times in seconds."""

    up_after_s: float = Field(default=15.0, ge=0, le=86400)
    """Requests wait, or KV memory is short, for so long: more workers."""
    down_after_s: float = Field(default=300.0, ge=0, le=86400)
    """One worker less would have been enough for so long: one less."""


class Routers(_Part):
    """All routers are alike; every worker is registered with each."""

    count: int = Field(default=1, ge=1, le=100)
    settings: dict[str, Any] = Field(default_factory=dict, repr=False)  # tokens may stand there
    resources: Resources = Field(default_factory=lambda: {HEAD: 0.001})


class Model(_Part):
    """The workers of one model."""

    workers: Annotated[Bounds, BeforeValidator(_bounds)]
    settings: dict[str, Any] = Field(repr=False)
    resources: Resources | None = None
    scaling: Scaling = Scaling()

    @property
    def needs(self) -> Resources:
        """Of one worker: what the file says; else one GPU, or one slot where no GPU is asked for."""
        if self.resources is not None:
            return self.resources
        on_cpu = self.settings.get("runner") == "sim" or self.settings.get("device") == "cpu"
        return {WORKER_SLOT: 1.0} if on_cpu else {"GPU": 1.0}


class FleetSpec(_Part):
    """A whole fleet.yaml."""

    routers: Routers = Routers()
    models: dict[str, Model] = Field(min_length=1)

    def router_settings(self, index: int) -> dict[str, Any]:
        """Of router `index`: as in the file, but each further router has its ports 10 higher."""
        settings = dict(self.routers.settings)
        for name, field in RouterSettings.model_fields.items():
            if is_port(name):
                port = settings.get(name, field.default)
                if int(port) > 0:  # 0: any free one; below: none
                    settings[name] = int(port) + _PORT_STEP * index
        return settings

    def worker_settings(self, model: str) -> dict[str, Any]:
        """Of every worker of a model, but for its id, its address and its routers."""
        return {**self.models[model].settings, "served_model_name": model}

    def revision(self, group: str) -> str:
        """Changes when members of the group must be replaced to be what the file says."""
        if group == ROUTER_GROUP:
            content: object = [self.routers.settings, self.routers.resources]
        else:
            content = [self.worker_settings(group), self.models[group].needs]
        return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()


class _OnceOnly(yaml.SafeLoader):
    """Takes no key twice: YAML's own loader would drop the first one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  its signature
        """Raises YAMLError."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


SpecT = TypeVar("SpecT", bound=BaseModel)


def parse_spec(text: str, origin: str = "fleet.yaml") -> FleetSpec:
    """The fleet that a YAML text describes. Raises SettingsError with a line for each fault that says what to do."""
    try:
        content = _OnceOnly(text).get_single_data()
    except yaml.YAMLError as error:
        raise SettingsError(f"{origin} is not YAML: {_yaml_fault(error)}") from None
    if not isinstance(content, dict):
        raise SettingsError(
            f"{origin} must hold the keys routers and models: `radixfleet fleet init` prints an example"
        )
    try:
        spec = FleetSpec.model_validate(content)
    except ValidationError as error:
        raise SettingsError(
            "\n".join(_fault(cast(Mapping[str, Any], fault), origin) for fault in error.errors())
        ) from None
    faults = _settings_faults(spec, origin)
    if faults:
        raise SettingsError("\n".join(faults))
    return spec


def read_spec(path: Path) -> FleetSpec:
    """The fleet of a file. Raises SettingsError."""
    try:
        return parse_spec(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror or error}") from None


def check_for_ray(spec: FleetSpec, origin: str) -> None:
    """What only matters on a cluster. Raises SettingsError."""
    if spec.routers.settings.get("processes", 1) != 1:
        raise SettingsError(
            f"processes in routers.settings of {origin} is of no use on Ray: give the fleet routers.count"
        )
    _check_tokens(spec, origin)
    for name, model in spec.models.items():
        given = str(model.settings.get("model", DEMO))
        if given != DEMO and not Path(given).expanduser().is_absolute():
            raise SettingsError(
                f"model in models.{name}.settings of {origin} must be a path from the root, for it is read on the "
                f"nodes of its workers; got {given!r}"
            )
    users: dict[int, str] = {}
    for index in range(spec.routers.count):
        for name, port in _ports(spec.router_settings(index)):
            user = f"{name} of router-{index}"
            if port > _LAST_PORT:
                raise SettingsError(f"{user} would be {port} in {origin}: the last port is {_LAST_PORT}")
            if port in users:
                raise SettingsError(
                    f"port {port} of {origin} is {users[port]} and {user}: each router's are {_PORT_STEP} higher than "
                    "those of the one before"
                )
            users[port] = user
        if HEAD not in spec.routers.resources:  # each has a node of its own, or may have
            users.clear()


def _check_tokens(spec: FleetSpec, origin: str) -> None:
    """`radixfleet up` makes a token where keys need one; on a cluster every member would fail instead."""
    parts = {"routers": spec.routers.settings} | {f"models.{name}": part.settings for name, part in spec.models.items()}
    for part, settings in parts.items():
        if settings.get("api_keys") and not settings.get("admin_token"):
            raise SettingsError(
                f"admin_token is missing in {part}.settings of {origin}, which has api_keys: workers register, and "
                "operators drain, with a token; `radixfleet keys new --token` makes one"
            )


def _settings_faults(spec: FleetSpec, origin: str) -> list[str]:
    routers = f"routers.settings of {origin}"
    faults = _group_faults(RouterSettings, spec.routers.settings, {}, routers)
    for name, model in spec.models.items():
        where = f"models.{name}.settings of {origin}"
        if not _MODEL_NAME.fullmatch(name) or name == ROUTER_GROUP:
            faults.append(
                f"models.{name} in {origin}: name a model by letters, digits and ._/-, and not {ROUTER_GROUP!r}"
            )
        faults += _group_faults(WorkerSettings, model.settings, {"served_model_name": name}, where)
        faults += _missing(spec.routers.settings, model.settings, routers, where)
        faults += _missing(model.settings, spec.routers.settings, where, routers)
        tokens = {str(settings.get("admin_token") or "@") for settings in (spec.routers.settings, model.settings)}
        if len(tokens) > 1 and not any(token.startswith("@") for token in tokens):
            faults.append(f"admin_token in {where} is not that of {routers}: {_BOTH_DIAL}")
    return faults


def _missing(one: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> list[str]:
    """Left alone, both would serve, know nothing of each other, and say so in their logs alone."""
    return [
        f"{needed} is missing in {there}: {here} has {name}, and {_BOTH_DIAL}"
        for name, needed in _NEEDED.items()
        if one.get(name) and not other.get(needed)
    ]


def _ports(settings: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(name, int(port)) for name, port in settings.items() if is_port(name) and int(port) > 0]


def _group_faults(cls: Any, settings: Mapping[str, Any], added: Mapping[str, Any], where: str) -> list[str]:
    decided = sorted(_FLEET_DECIDES & settings.keys())
    if decided:
        return [f"{name} in {where} is decided by the fleet: remove it" for name in decided]
    try:
        check(cls, {**settings, **added}, where)
    except SettingsError as error:
        return str(error).splitlines()
    return []


def _fault(fault: Mapping[str, Any], origin: str) -> str:
    *parents, name = [str(part) for part in fault["loc"]] or [""]
    path = ".".join([*parents, name])
    if fault["type"] == "extra_forbidden":
        return f"unknown key {path} in {origin}{nearest(name, _keys_beside(parents))}"
    if fault["type"] == "too_short":
        return f"{path} in {origin} must name at least one: `radixfleet fleet init` prints an example"
    if fault["type"] == "missing":
        return f"{path} is missing in {origin}: `radixfleet fleet init` prints an example with all keys"
    if fault["type"] in ("model_type", "dict_type", "model_attributes_type"):
        known = ", ".join(_keys_beside([*parents, name])) or "`name: value` lines"
        return f"{path} in {origin} must hold {known}; got {shown(fault['input'])}"
    is_of_several = isinstance(fault["input"], dict)  # then the complaint begins with one of them
    return f"{path} in {origin}{':' if is_of_several else ''} {complaint(cast(Any, fault))}"


def _yaml_fault(error: yaml.YAMLError) -> str:
    """In one line, the place first."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _keys_beside(parents: list[str]) -> list[str]:
    """The keys that a part of the file may have."""
    shapes: dict[tuple[str, ...], type[BaseModel]] = {
        (): FleetSpec,
        ("routers",): Routers,
        ("models", "*"): Model,
        ("models", "*", "workers"): Bounds,
        ("models", "*", "scaling"): Scaling,
    }
    shape = shapes.get(
        tuple("*" if index == 1 and parents[0] == "models" else part for index, part in enumerate(parents))
    )
    return list(shape.model_fields) if shape else []
