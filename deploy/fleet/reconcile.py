"""What to do so that the fleet becomes what is wanted: a pure function of what is wanted and what is seen.

Called about every second with what is seen then, so nothing here remembers anything. For each group of members that are
alike (the routers, or the workers of one model):

1. What is gone is forgotten; what is to leave is drained, then removed; what has failed is restarted, each time later.
2. As many are started as are short, MOST_STARTS at most. Draining members do not count: their successors need not wait
   for them (but for routers, whose ports are theirs until they have gone).
3. Of too many, those that serve nobody go first, then the idlest.
4. Members of another revision are replaced one at a time: a new one first (`surge`), then an old one is drained. Where
   the cluster has no room for one more, an old one makes room after PATIENCE_S; the last that serves, after
   LONGEST_WAIT_S, for a node may be on its way, and until then nobody would serve. A new one that has failed is not
   trusted until it has served for a while: else new ones that serve only for moments would replace all.
5. The last of a group that serves and shall leave goes when a successor serves, fails, or takes longer than
   LONGEST_WAIT_S to get a place, or to load; one whose machine is being emptied waits as long as that one can
   (`hurried`), and one that must go now (`unheld`) not at all.

A member that serves is drained before it is removed, and but for an operator's order, and 4 without room, never while
fewer than the group's count would serve without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Literal, TypeAlias

from radixfleet.membership import Phase

PATIENCE_S = 30.0
"""A successor waits so long for a place before an old member makes room for it, which is not the last that serves."""
LONGEST_WAIT_S = 1800.0
"""While the last of its predecessors serves, a successor may wait for a place, or load its model, for so long: Ray's
autoscaler gets a node with a GPU in minutes, where there is one to be had."""
LOST_S = 30.0
"""A member that does not answer for so long is restarted, or removed. Ray restarts what has died long before."""
MOST_STARTS = 32
"""At once: between two turns new orders are heard."""
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0

SeenPhase: TypeAlias = Phase | Literal["pending", "lost", "gone"]
"""Besides what members say of themselves: pending has no place in the cluster yet, lost does not answer, gone is no
actor any more."""


@dataclass(frozen=True, slots=True)
class Group:
    """Members that are alike, as wanted."""

    name: str
    count: int
    revision: str
    surge: int = 1
    """How many more than `count` there may be while members are replaced: 0 for routers, whose ports stay theirs."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member, as seen."""

    name: str
    group: str
    revision: str
    phase: SeenPhase
    phase_s: float = 0.0
    """For how long."""
    failures: int = 0
    """How often it ceased to serve, or could not, since it last served for long."""
    running_requests: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an operator has asked for, and what was decided before."""

    groups: tuple[Group, ...]
    leaving: frozenset[str] = frozenset()
    """Members that shall go, for good."""
    restarting: frozenset[str] = frozenset()
    """Members that shall be drained and start again."""
    hurried: Mapping[str, float] = field(default_factory=dict)
    """Of those that shall go, whose machine is being emptied, each with the seconds that it waits for a successor to
    get a place, and to load."""
    unheld: frozenset[str] = frozenset()
    """Of those that shall go, who go at once, though nobody else serves: an operator said so, or their machine has just
    the time left that running requests need."""


@dataclass(frozen=True, slots=True)
class Start:
    """Make a member."""

    name: str
    group: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Have it take no new requests. Unless it shall restart, it is leaving from now on."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Remove:
    """End it for good, and forget it."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Restart:
    """End it and have it start again, with the first arguments."""

    name: str
    why: str


Action: TypeAlias = Start | Drain | Remove | Restart


def reconcile(wanted: Wanted, members: Sequence[Member]) -> list[Action]:
    """The next actions, all of which may be taken at once. None: all is well, or there is something to wait for."""
    actions: list[Action] = []
    groups = {group.name: group for group in wanted.groups}
    for name in sorted(groups.keys() | {member.group for member in members}):
        group = groups.get(name) or Group(name, 0, "")
        actions += _reconcile_group(group, [member for member in members if member.group == name], wanted)
    return actions


def _reconcile_group(group: Group, members: Sequence[Member], wanted: Wanted) -> list[Action]:
    actions: list[Action] = []
    staying: list[Member] = []
    for member in members:
        action, stays = _by_itself(member, wanted)
        actions += [action] if action else []
        staying += [member] if stays else []
    last = _last_to_leave(actions, wanted)
    if last is not None and _is_succeeded_soon(group, staying, wanted.hurried.get(last.name, LONGEST_WAIT_S)):
        actions = [action for action in actions if action is not last]
    leaving = _surplus(group, staying)
    staying = [member for member in staying if member not in leaving]
    outdated = _outdated_to_go(group, staying)
    going = {member.name for member in (*leaving, *outdated)}
    actions = [action for action in actions if action.name not in going]  # who goes is not started again first
    actions += [_farewell(member, "the fleet has more than it shall") for member in leaving]
    actions += [_farewell(member, "its settings have changed") for member in outdated]
    staying = [member for member in staying if member not in outdated]
    # A name is free again when its last bearer has been removed, which then is seen in the next turn.
    taken = {member.name for member in members}
    return actions + _starts(group, staying, taken)


def _by_itself(member: Member, wanted: Wanted) -> tuple[Action | None, bool]:  # noqa: C901, PLR0911  case by case
    """What one member needs, whatever its group needs; and whether it counts as one of the group."""
    name, phase = member.name, member.phase
    if phase == "gone":
        return Remove(name, "its actor is gone"), False
    if name in wanted.leaving:
        if phase == "serving":
            return Drain(name, "it shall leave"), False
        if phase == "draining" or (phase == "lost" and member.phase_s < LOST_S):
            return None, False
        return Remove(name, "it has left"), False
    if name in wanted.restarting:
        if phase == "serving":
            return Drain(name, "it shall restart"), True
        return None if phase in ("draining", "pending") else Restart(name, "it was asked for"), True
    if phase == "draining":
        return None, False
    if phase == "drained":
        return Remove(name, "it was drained"), False
    if phase == "failed" and member.phase_s >= pause_s(member.failures):
        return Restart(name, "it has failed"), True
    if phase == "lost" and member.phase_s >= LOST_S:
        return Restart(name, "it does not answer"), True
    return None, True


def _last_to_leave(actions: Sequence[Action], wanted: Wanted) -> Drain | None:
    """Of those who would be told now that they shall leave, the one that can best go on for a while."""
    held = wanted.leaving - wanted.unheld
    drains = [action for action in actions if isinstance(action, Drain) and action.name in held]
    return min(drains, key=lambda drain: drain.name in wanted.hurried, default=None)


def _is_succeeded_soon(group: Group, staying: Sequence[Member], patience_s: float) -> bool:
    """Nobody who stays serves, but one will: for that long, the last of those who shall leave goes on."""
    if any(member.phase == "serving" for member in staying):
        return False
    longest_s = {"pending": patience_s, "starting": patience_s, "lost": LOST_S}
    on_the_way = any(member.phase_s < longest_s.get(member.phase, 0.0) for member in staying)
    return on_the_way or (group.surge > 0 and len(staying) < group.count)


def pause_s(failures: int) -> float:
    """How long a member that failed so many times in a row stays so before it is started again."""
    return float(min(FIRST_PAUSE_S * 2.0 ** min(max(0, failures - 1), 10), LONGEST_PAUSE_S))


def _surplus(group: Group, staying: Sequence[Member]) -> list[Member]:
    """Those by which the group is too large, while none of them is about to replace another."""
    current = [member for member in staying if member.revision == group.revision]
    outdated = [member for member in staying if member.revision != group.revision]
    allowed = group.count + (group.surge if outdated else 0)
    over = max(len(staying) - allowed, len(current) - group.count)
    if over <= 0:
        return []
    candidates = current if len(current) > group.count else staying
    spare = _num_serving(staying) - group.count
    victims: list[Member] = []
    for member in sorted(candidates, key=lambda each: _dispensable(each, group)):
        if len(victims) < over and (not _may_serve(member) or (member.phase == "serving" and spare > 0)):
            victims.append(member)
            spare -= member.phase == "serving"
    return victims


def _dispensable(member: Member, group: Group) -> tuple[object, ...]:
    """Sorts first what is missed least."""
    order = ("pending", "failed", "lost", "starting", "serving")
    is_current = member.revision == group.revision
    return (
        order.index(member.phase) if member.phase in order else 0,
        is_current,
        member.running_requests,
        _number(member),
    )


def _number(member: Member) -> int:
    """The youngest name first."""
    return -int(member.name.rpartition("-")[2])


def _outdated_to_go(group: Group, staying: Sequence[Member]) -> list[Member]:
    """Members of another revision that can be spared now."""
    outdated = [member for member in staying if member.revision != group.revision]
    idle = [member for member in outdated if not _may_serve(member)]
    serving = [member for member in outdated if member.phase == "serving"]
    if idle or not serving:
        return idle
    current = [member for member in staying if member.revision == group.revision]
    if any(member.phase == "serving" and member.failures for member in current):
        return []
    patience_s = PATIENCE_S if _num_serving(staying) > 1 else LONGEST_WAIT_S
    no_room = any(member.phase == "pending" and member.phase_s >= patience_s for member in current)
    needed = group.count + (0 if no_room else group.surge)
    if _num_serving(staying) < needed:
        return []
    return [min(serving, key=lambda each: (each.running_requests, each.name))]


def _may_serve(member: Member) -> bool:
    """Who does not answer the supervisor for a moment may have streams running all the same."""
    return member.phase == "serving" or (member.phase == "lost" and member.phase_s < LOST_S)


def _num_serving(members: Sequence[Member]) -> int:
    return sum(member.phase == "serving" for member in members)


def _farewell(member: Member, why: str) -> Action:
    return Drain(member.name, why) if member.phase == "serving" else Remove(member.name, why)


def _starts(group: Group, staying: Sequence[Member], taken: set[str]) -> list[Action]:
    current = sum(member.revision == group.revision for member in staying)
    allowed = group.count + (group.surge if current < len(staying) else 0)
    # Where names are places (routers' ports), a successor waits until its predecessor's is free.
    there = len(staying) if group.surge else len(taken)
    short = min(group.count - current, allowed - there, MOST_STARTS)
    return [Start(name, group.name) for name in islice(free_names(group.name, taken), max(0, short))]


def free_names(group: str, taken: set[str]) -> Iterator[str]:
    """The group's name and the lowest numbers that are free."""
    return (name for number in count() if (name := f"{group}-{number}") not in taken)
