"""Settings of a process, each declared once: a field with its type, default, bounds and description.

From the one declaration follow the command line option (`click_options`), the environment variable (prefix + upper-case
name), the key of the YAML file, and the texts of help and errors. Precedence: command line > environment > YAML file >
default. A key that no setting has, in the file or under the prefix in the environment, is an error at start that names
the nearest settings.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, Union, get_args, get_origin

import click
import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

Command = TypeVar("Command", bound=Callable[..., Any])
SettingsT = TypeVar("SettingsT", bound="ProcessSettings")

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class SettingsError(click.UsageError):
    """A setting is wrong. `str()` has one line a fault: which setting, where it was set, and what to do."""


def parse_bytes(value: str | int) -> int:
    """A size in bytes from 8589934592, "8GiB", "512 MiB" or "2GB" (decimal). ValueError says what to write."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError(f"must be a size such as 8GiB or 512MiB, or a number of bytes; got {value!r}")
    number, unit = match.groups()
    factor = _UNITS.get(unit.upper())
    if factor is None:
        raise ValueError(f"has an unknown unit {unit!r}; write KiB, MiB, GiB or TiB (1024) or KB, MB, GB or TB (1000)")
    return round(float(number) * factor)


def format_bytes(num_bytes: float) -> str:
    """A size for people: 1536 -> "1.5 KiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _split(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(part.strip() for item in value for part in str(item).split(",") if part.strip())
    return value


class _Metavar(str):
    """The word that help shows in place of an option's value."""

    __slots__ = ()


def _not_negative(value: int) -> int:
    if value < 0:
        raise ValueError("must not be negative")
    return value


ByteSize: TypeAlias = Annotated[int, BeforeValidator(parse_bytes), AfterValidator(_not_negative), _Metavar("SIZE")]
"""A setting in bytes that people write as 8GiB."""

CommaList: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_split), _Metavar("A,B,...")]
"""Several words: comma-separated in the environment, a list in YAML, repeated or comma-separated as an option."""

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class ProcessSettings(BaseSettings):
    """Base of the settings of a process: frozen, unknown keys refused, as is one port for two servers.

    Constructing one looks at its arguments only; `load` looks at the environment and the YAML file too. Subclasses set
    `model_config = SettingsConfigDict(env_prefix="RADIXFLEET_...")`.
    """

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, enable_decoding=False, env_ignore_empty=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The arguments alone, so that a setting never comes from a place that the caller did not name."""
        return (init_settings,)

    @model_validator(mode="after")
    def _has_a_port_for_each(self) -> Self:
        names = [name for name in type(self).model_fields if is_port(name)]
        shared = shared_port({option_name(name): getattr(self, name) for name in names})
        if shared:
            raise ValueError(shared)
        return self


def load(
    cls: type[SettingsT],
    cli_values: Mapping[str, Any],
    config_file: Path | None = None,
    prefix: str | None = None,
) -> SettingsT:
    """Settings from all sources. `cli_values`: by field name; None and () mean that the option was not given.

    `prefix` of the environment variables: the class's own `env_prefix` unless given. Raises SettingsError.
    """
    prefix = prefix if prefix is not None else str(cls.model_config.get("env_prefix", ""))
    given = {name: value for name, value in cli_values.items() if value is not None and value != ()}
    environment = EnvSettingsSource(cls, env_prefix=prefix)()
    file_values = _read_yaml(config_file) if config_file is not None else {}
    faults = _unknown_keys(cls, file_values, str(config_file)) + _unknown_variables(cls, prefix)
    if faults:
        raise SettingsError("\n".join(faults))
    try:
        return cls(**{**file_values, **environment, **given})
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            name = str(fault["loc"][0]) if fault["loc"] else ""
            if name in given or fault["type"] == "missing":
                origin = option_name(name)
            elif name in environment:
                origin = f"{prefix}{name}".upper()
            else:
                origin = f"{name} in {config_file}" if name in file_values else name
            lines.append(f"{origin} {complaint(fault)}" if name else complaint(fault))
        raise SettingsError("\n".join(lines)) from None


def check(cls: type[SettingsT], values: Mapping[str, Any], origin: str) -> SettingsT:
    """Settings from `values` alone, whatever the environment says. Raises SettingsError, whose lines name `origin`."""
    faults = _unknown_keys(cls, values, origin)
    try:
        if not faults:
            return cls(**values)
    except ValidationError as error:
        for fault in error.errors():
            name = " ".join(map(str, fault["loc"]))
            faults.append(f"{name} in {origin} {complaint(fault)}" if name else f"{origin}: {complaint(fault)}")
    raise SettingsError("\n".join(faults))


def option_name(field_name: str) -> str:
    """mem_fraction_static -> --mem-fraction-static."""
    return "--" + field_name.replace("_", "-")


def is_port(field_name: str) -> bool:
    """Whether a setting is a port to listen on, by its name."""
    return field_name == "port" or field_name.endswith("_port")


def shared_port(ports: Mapping[str, int]) -> str:
    """Which two options (name: port) have the same port, and what to do; empty: none. 0 and -1 are no ports."""
    users: dict[int, str] = {}
    for option, port in ports.items():
        user = users.setdefault(port, option)
        if port > 0 and user != option:
            return f"{user} and {option} are both {port}: give each a port of its own, or 0 for any free one"
    return ""


def click_options(cls: type[ProcessSettings], *, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Decorator: gives a click command one option for each field of `cls` but those in `without`, and `--config`.

    The command receives every field by name, None (or ()) where the option was not given, and `config: Path | None`:

        def run(config: Path | None, **options: Any) -> None:
            settings = load(WorkerSettings, options, config)
    """
    prefix = str(cls.model_config.get("env_prefix", ""))

    def decorate(command: Command) -> Command:
        for name, field in reversed([item for item in cls.model_fields.items() if item[0] not in without]):
            command = _option(name, field, prefix)(command)
        return click.option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="YAML file of settings, named as the options are but with underscores.",
        )(command)

    return decorate


def _option(name: str, field: FieldInfo, prefix: str) -> Callable[[Command], Command]:
    """Values stay strings and are judged by the settings class, so that all sources give the same errors."""
    help_text = f"{field.description or ''} {_help_suffix(field, prefix + name.upper())}".strip()
    choices = _literal_values(field.annotation)
    if _accepts(field.annotation, bool):
        option = option_name(name)
        return click.option(f"{option}/--no-{option[2:]}", name, default=None, help=help_text)
    if choices:
        return click.option(option_name(name), name, type=click.Choice(choices), default=None, help=help_text)
    multiple = _accepts(field.annotation, tuple)
    return click.option(
        option_name(name), name, type=click.STRING, multiple=multiple, metavar=_metavar(field), help=help_text
    )


def _help_suffix(field: FieldInfo, variable: str) -> str:
    signs: dict[type, tuple[str, str]] = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
    bounds = [
        f"{signs[type(bound)][0]} {getattr(bound, signs[type(bound)][1])}"
        for bound in field.metadata
        if type(bound) in signs
    ]
    notes = [", ".join(bounds)] if bounds else []
    if field.default is not PydanticUndefined and field.default is not None and field.default != ():
        notes.insert(0, f"default {_shown(field)}")
    elif field.is_required():
        notes.insert(0, "required")
    return f"[{'; '.join([*notes, f'env {variable}'])}]"


def _shown(field: FieldInfo) -> str:
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return format_bytes(field.default) if _metavar(field) == "SIZE" else str(field.default)


def _parts(annotation: Any) -> list[Any]:
    """The annotation with its unions and Annotated taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return [*_parts(get_args(annotation)[0]), *get_args(annotation)[1:]]
    if origin in (Union, UnionType):
        return [part for arm in get_args(annotation) for part in _parts(arm)]
    return [annotation]


def _accepts(annotation: Any, kind: type) -> bool:
    return any(part is kind or get_origin(part) is kind for part in _parts(annotation))


def _literal_values(annotation: Any) -> list[str]:
    return [str(value) for part in _parts(annotation) if get_origin(part) is Literal for value in get_args(part)]


def _metavar(field: FieldInfo) -> str:
    for part in [*field.metadata, *_parts(field.annotation)]:
        if isinstance(part, _Metavar):
            return str(part)
    names = {int: "INTEGER", float: "NUMBER", Path: "PATH"}
    return next((shown for kind, shown in names.items() if _accepts(field.annotation, kind)), "TEXT")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"the settings file {path} must hold `name: value` lines")
    return {str(name): value for name, value in content.items() if value is not None}


def _unknown_keys(cls: type[ProcessSettings], values: Mapping[str, Any], origin: str) -> list[str]:
    return [
        f"unknown setting {name} in {origin}{nearest(name, list(cls.model_fields))}"
        for name in values
        if name not in cls.model_fields
    ]


def _unknown_variables(cls: type[ProcessSettings], prefix: str) -> list[str]:
    known = [name.upper() for name in cls.model_fields]
    strangers = [
        name[len(prefix) :]
        for name in sorted(os.environ)
        if prefix and name.startswith(prefix) and name[len(prefix) :] not in known
    ]
    return [f"unknown environment variable {prefix}{name}{nearest(name, known, prefix)}" for name in strangers]


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """For the end of a complaint about an unknown name: "; did you mean ...?", or nothing."""
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(prefix + match for match in matches)}?" if matches else ""


_COMPLAINTS: dict[str, str] = {
    "missing": "is required: set it",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text (quote it)",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}


def complaint(fault: ErrorDetails) -> str:
    """What is wrong with a setting, as the end of a sentence that its name begins."""
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    template = _COMPLAINTS.get(fault["type"])
    text = template.format(**fault.get("ctx", {})) if template else fault["msg"]
    return text if fault["type"] == "missing" else f"{text}; got {shown(fault['input'])}"


def shown(value: object) -> str:
    """What was given, for a complaint; of what holds others its kind alone, for there may be a token in it."""
    if isinstance(value, Mapping):
        return "names with values"
    return "a list" if isinstance(value, list | tuple) else repr(value)
