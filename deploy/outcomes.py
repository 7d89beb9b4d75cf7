"""What a load on fleets came to, as an exit status."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import click

from loadtest.statistics import Summary


def require_answers(summaries: Sequence[Summary], errors: Collection[str]) -> None:
    """Raises ClickException (exit status 1) where a policy or a fleet has answered nothing: its figures tell nothing.

    For after the figures are shown. `errors`: of the requests, where they are not shown yet.
    """
    silent = [each.policy for each in summaries if each.failed == each.requests]
    if silent:
        where = "" if len(silent) == len(summaries) else " by " + ", ".join(dict.fromkeys(silent))
        why = f": {min(errors)}" if errors else ""
        raise click.ClickException(f"no request was answered{where}{why}")
