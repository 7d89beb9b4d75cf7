"""What counts as a number on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
import pytest

from deploy.command_line import COMMANDS, cli
from deploy.numbers import Number


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-inf", "Infinity", "1e999"])
def test_what_is_not_finite_is_refused(text: str) -> None:
    """Behaviour 34."""
    for number in (Number(), Number(0), Number(0, 1, min_open=True)):
        with pytest.raises(click.BadParameter):
            number.convert(text, None, None)


def test_bounds_hold_and_numbers_pass() -> None:
    assert Number().convert("-2.5", None, None) == -2.5
    assert Number(0, 1).convert("1", None, None) == 1.0
    with pytest.raises(click.BadParameter, match="range"):
        Number(0, min_open=True).convert("0", None, None)


def test_help_tells_of_bounds_where_there_are_some(radixfleet: Callable[..., tuple[int, str, str]]) -> None:
    for command in ("generate", "chat", "explain"):
        assert "None" not in radixfleet(command, "--help")[1]
    assert "[x>0]" in radixfleet("generate", "--help")[1]


def _commands(command: click.Command, context: click.Context) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _commands(child, context)


def test_no_option_of_any_command_takes_a_number_that_is_not_finite() -> None:
    """Behaviour 34: on the entry that people type. (Settings of router and worker refuse them by themselves.)"""
    context = click.Context(cli)
    lax = [
        f"{command.name} {option.name}"
        for command in _commands(cli, context)
        for option in command.params
        if isinstance(option.type, click.types.FloatParamType) and not isinstance(option.type, Number)
    ]
    assert len(COMMANDS) > 10
    assert lax == []
