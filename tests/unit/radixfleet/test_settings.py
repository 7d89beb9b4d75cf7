"""One declaration gives option, variable and YAML key; what is wrong is said so that it can be put right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from radixfleet.settings import (
    ByteSize,
    CommaList,
    ProcessSettings,
    SettingsError,
    check,
    click_options,
    format_bytes,
    load,
    parse_bytes,
)

PREFIX = "RADIXFLEET_SAMPLE_"


class Sample(ProcessSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX)

    model: str = Field(description="What to serve.")
    mem_fraction_static: float = Field(0.9, gt=0, lt=1, description="Share of the rest.")
    page_size: int = Field(16, ge=1, le=64, description="Tokens in a page.")
    device_memory: ByteSize | None = Field(None, description="Size of the device.")
    message_size: ByteSize = Field(64 * 1024**2, description="Longest message.")
    overlap: bool = Field(default=True, description="Plan ahead.")
    dtype: Literal["auto", "bfloat16"] = Field("auto", description="Of the weights.")
    routers: CommaList = Field((), description="Where to register.")
    log_file: Path | None = Field(None, description="Where to log.")

    @model_validator(mode="after")
    def _sizes_agree(self) -> Sample:
        if self.device_memory is not None and self.device_memory < self.message_size:
            raise ValueError("--device-memory must hold at least one message of --message-size")
        return self


class Ports(ProcessSettings):
    port: int = Field(70, description="Of calls.")
    metrics_port: int = Field(71, description="Of metrics.")
    http_port: int = Field(-1, description="Of HTTP.")


@click.command()
@click_options(Sample)
def show(config: Path | None, **options: Any) -> None:
    click.echo(load(Sample, options, config).model_dump_json())


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("RADIXFLEET_"):
            monkeypatch.delenv(name)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return write


def error_of(**sources: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(Sample, sources.get("cli", {}), sources.get("config"))
    return str(caught.value)


class TestPrecedence:
    def test_default_yaml_environment_command_line(self, yaml_file, monkeypatch):
        config = yaml_file("model: from-yaml\npage_size: 1\nmem_fraction_static: 0.1\ndtype: bfloat16\n")
        monkeypatch.setenv(PREFIX + "PAGE_SIZE", "2")
        monkeypatch.setenv(PREFIX + "MEM_FRACTION_STATIC", "0.2")
        settings = load(Sample, {"mem_fraction_static": "0.3"}, config)
        assert settings.mem_fraction_static == 0.3
        assert settings.page_size == 2
        assert settings.dtype == "bfloat16"
        assert settings.message_size == 64 * 1024**2

    def test_what_was_not_given_does_not_hide_the_rest(self, monkeypatch):
        monkeypatch.setenv(PREFIX + "MODEL", "m")
        monkeypatch.setenv(PREFIX + "ROUTERS", "a:1, b:2")
        monkeypatch.setenv(PREFIX + "OVERLAP", "false")
        settings = load(Sample, {"model": None, "routers": (), "overlap": None})
        assert (settings.model, settings.routers, settings.overlap) == ("m", ("a:1", "b:2"), False)

    def test_an_empty_variable_is_none(self, monkeypatch):
        monkeypatch.setenv(PREFIX + "PAGE_SIZE", "")
        assert load(Sample, {"model": "m"}).page_size == 16

    def test_constructing_looks_at_the_arguments_alone(self, monkeypatch):
        monkeypatch.setenv(PREFIX + "PAGE_SIZE", "2")
        assert Sample(model="m").page_size == 16

    def test_another_prefix_can_be_given(self, monkeypatch):
        monkeypatch.setenv("OTHER_PAGE_SIZE", "2")
        assert load(Sample, {"model": "m"}, prefix="OTHER_").page_size == 2

    def test_settings_are_frozen(self):
        settings = Sample(model="m")
        with pytest.raises(ValidationError, match="frozen"):
            settings.page_size = 3

    def test_lists_from_every_source(self, yaml_file):
        assert load(Sample, {"model": "m"}, yaml_file("routers: [a, b]")).routers == ("a", "b")
        assert load(Sample, {"model": "m"}, yaml_file("routers: a,b")).routers == ("a", "b")
        assert load(Sample, {"model": "m", "routers": ("a,b", "c")}).routers == ("a", "b", "c")


class TestErrors:
    @pytest.mark.parametrize(
        ("cli", "message"),
        [
            ({"page_size": "65"}, "--page-size must be at most 64; got '65'"),
            ({"page_size": "0"}, "--page-size must be at least 1; got '0'"),
            ({"page_size": "4.5"}, "--page-size must be a whole number; got '4.5'"),
            ({"mem_fraction_static": "0"}, "--mem-fraction-static must be greater than 0.0; got '0'"),
            ({"mem_fraction_static": "1"}, "--mem-fraction-static must be less than 1.0; got '1'"),
            ({"mem_fraction_static": "nan"}, "--mem-fraction-static must be a finite number; got 'nan'"),
            ({"mem_fraction_static": "much"}, "--mem-fraction-static must be a number; got 'much'"),
            ({"overlap": "maybe"}, "--overlap must be true or false; got 'maybe'"),
            ({"dtype": "int4"}, "--dtype must be 'auto' or 'bfloat16'; got 'int4'"),
            ({"device_memory": "8G"}, "--device-memory has an unknown unit 'G'; write KiB, MiB, GiB or TiB (1024)"),
            ({"device_memory": "-1"}, "--device-memory must be a size such as 8GiB or 512MiB"),
        ],
    )
    def test_one_line_that_names_the_option_and_the_remedy(self, cli, message):
        text = error_of(cli={"model": "m", **cli})
        assert text.startswith(message)
        assert "\n" not in text

    def test_the_origin_is_named(self, yaml_file, monkeypatch):
        config = yaml_file("model: m\npage_size: 100")
        monkeypatch.setenv(PREFIX + "MEM_FRACTION_STATIC", "2")
        assert sorted(error_of(config=config).splitlines()) == [
            f"{PREFIX}MEM_FRACTION_STATIC must be less than 1.0; got '2'",
            f"page_size in {config} must be at most 64; got 100",
        ]

    def test_a_missing_setting(self):
        assert error_of() == "--model is required: set it"

    def test_a_rule_over_several_settings(self):
        assert error_of(cli={"model": "m", "device_memory": "1MiB"}) == (
            "--device-memory must hold at least one message of --message-size"
        )

    @pytest.mark.parametrize(
        ("ports", "said"),
        [
            ({"port": 5, "http_port": 5}, "--port and --http-port are both 5: give each a port of its own, or 0"),
            ({"port": 71}, "--port and --metrics-port are both 71: "),
        ],
    )
    def test_one_port_for_two_servers(self, ports, said):
        with pytest.raises(SettingsError) as caught:
            load(Ports, ports)
        assert str(caught.value).startswith(said)
        with pytest.raises(SettingsError) as caught:
            check(Ports, ports, "f.yaml")
        assert str(caught.value).startswith(f"f.yaml: {said}")

    @pytest.mark.parametrize("none", [0, -1])
    def test_any_port_and_none_are_no_port(self, none):
        settings = load(Ports, {"port": 71, "metrics_port": none, "http_port": none})
        assert (settings.metrics_port, settings.http_port) == (none, none)

    def test_an_unknown_yaml_key_names_near_ones(self, yaml_file):
        config = yaml_file("model: m\npagesize: 3\nzzz: 1")
        assert error_of(config=config).splitlines() == [
            f"unknown setting pagesize in {config}; did you mean page_size or message_size?",
            f"unknown setting zzz in {config}",
        ]

    def test_an_unknown_variable_names_near_ones(self, monkeypatch):
        monkeypatch.setenv(PREFIX + "PAGE_SIZ", "3")
        assert error_of(cli={"model": "m"}).startswith(
            f"unknown environment variable {PREFIX}PAGE_SIZ; did you mean {PREFIX}PAGE_SIZE"
        )

    def test_variables_of_other_processes_are_not_ours(self, monkeypatch):
        monkeypatch.setenv("RADIXFLEET_OTHER_THING", "3")
        assert load(Sample, {"model": "m"}).model == "m"

    @pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "just words"])
    def test_a_file_that_holds_no_settings(self, yaml_file, text):
        assert "settings.yaml" in error_of(config=yaml_file(text))

    def test_a_file_that_is_not_there(self, tmp_path):
        assert error_of(config=tmp_path / "none.yaml").endswith("none.yaml: No such file or directory")

    def test_an_empty_file_sets_nothing(self, yaml_file):
        assert load(Sample, {"model": "m"}, yaml_file("")).page_size == 16


class TestCommandLine:
    def test_options_of_every_kind(self, tmp_path):
        result = CliRunner().invoke(
            show,
            [
                *("--model", "m", "--mem-fraction-static", "0.5", "--page-size", "1", "--device-memory", "8GiB"),
                *("--no-overlap", "--dtype", "bfloat16", "--routers", "a:1", "--routers", "b:2,c:3"),
                *("--log-file", str(tmp_path / "log")),
            ],
        )
        assert result.exit_code == 0, result.output
        settings = Sample.model_validate_json(result.output)
        assert settings == Sample(
            model="m",
            mem_fraction_static=0.5,
            page_size=1,
            device_memory=8 * 1024**3,
            overlap=False,
            dtype="bfloat16",
            routers=("a:1", "b:2", "c:3"),
            log_file=tmp_path / "log",
        )

    def test_help_teaches(self):
        text = " ".join(CliRunner().invoke(show, ["--help"], terminal_width=200).output.split())
        assert f"--mem-fraction-static NUMBER Share of the rest. [default 0.9; > 0, < 1; env {PREFIX}" in text
        assert "--device-memory SIZE" in text
        assert "[default 64.0 MiB; env" in text
        assert "--overlap / --no-overlap Plan ahead. [default on;" in text
        assert "--dtype [auto|bfloat16]" in text
        assert "--routers A,B,..." in text
        assert "--model TEXT What to serve. [required;" in text
        assert "--config FILE" in text

    def test_a_wrong_value_is_a_usage_error(self):
        result = CliRunner().invoke(show, ["--model", "m", "--page-size", "100"])
        assert result.exit_code == 2
        assert "Error: --page-size must be at most 64; got '100'" in result.output

    def test_the_config_option(self, yaml_file):
        result = CliRunner().invoke(show, ["--config", str(yaml_file("model: y\npage_size: 4"))])
        assert Sample.model_validate_json(result.output).page_size == 4

    def test_settings_can_be_left_out(self):
        @click.command()
        @click_options(Sample, without={"model", "log_file"})
        def part(**options: Any) -> None:
            click.echo(",".join(sorted(options)))

        result = CliRunner().invoke(part, [])
        assert result.output.strip() == (
            "config,device_memory,dtype,mem_fraction_static,message_size,overlap,page_size,routers"
        )
        assert CliRunner().invoke(part, ["--model", "m"]).exit_code == 2


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (7, 7),
            ("7", 7),
            ("8GiB", 8 * 1024**3),
            ("512 MiB", 512 * 1024**2),
            ("1.5KiB", 1536),
            ("2GB", 2 * 1000**3),
            ("3tib", 3 * 1024**4),
            (" 5 B ", 5),
        ],
    )
    def test_parse(self, text, expected):
        assert parse_bytes(text) == expected

    @pytest.mark.parametrize("text", ["", "GiB", "1 2", "-3", "1e9", "8G", "1 XiB", True, "nan"])
    def test_refused(self, text):
        with pytest.raises(ValueError, match=r"must be a size|unknown unit"):
            parse_bytes(text)

    @pytest.mark.parametrize(
        ("size", "expected"),
        [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 * 1024**3, "8.0 GiB"), (5000 * 1024**4, "5000.0 TiB")],
    )
    def test_format(self, size, expected):
        assert format_bytes(size) == expected

    @pytest.mark.parametrize("size", [512, 1536, 3 * 1024**2, 141 * 1024**3])
    def test_what_is_printed_can_be_read(self, size):
        assert parse_bytes(format_bytes(size)) == size
