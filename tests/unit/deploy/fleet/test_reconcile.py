"""What the supervisor does next, as a function of what is wanted and what is seen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from deploy.fleet.reconcile import (
    LONGEST_WAIT_S,
    LOST_S,
    MOST_STARTS,
    PATIENCE_S,
    Action,
    Drain,
    Group,
    Member,
    Remove,
    Restart,
    Start,
    Wanted,
    free_names,
    pause_s,
    reconcile,
)


def worker(number: int, phase: str = "serving", revision: str = "a", **fields: object) -> Member:
    return Member(f"m-{number}", "m", revision, phase, **fields)  # type: ignore[arg-type]


def wanted(count: int, revision: str = "a", surge: int = 1, **fields: object) -> Wanted:
    return Wanted((Group("m", count, revision, surge),), **fields)  # type: ignore[arg-type]


def kinds(actions: list[Action]) -> list[tuple[str, str]]:
    return [(type(action).__name__, action.name) for action in actions]


def test_what_is_short_is_started_under_the_lowest_free_names():
    assert reconcile(wanted(3), [worker(1)]) == [Start("m-0", "m"), Start("m-2", "m")]


def test_a_fleet_that_is_as_wanted_is_left_alone():
    assert reconcile(wanted(2), [worker(0), worker(1)]) == []


def test_those_that_start_count_as_there():
    assert reconcile(wanted(3), [worker(0, "pending"), worker(1, "starting"), worker(2, "lost")]) == []


def test_scaling_down_takes_first_what_serves_nobody_then_the_idlest():
    members = [worker(0, running_requests=5), worker(1, running_requests=1), worker(2), worker(3, "starting")]
    assert kinds(reconcile(wanted(3), members)) == [("Remove", "m-3")]
    assert kinds(reconcile(wanted(2), members)) == [("Remove", "m-3"), ("Drain", "m-2")]
    assert kinds(reconcile(wanted(1), members)) == [("Remove", "m-3"), ("Drain", "m-2"), ("Drain", "m-1")]


def test_a_model_that_left_the_file_is_drained_then_removed():
    nothing = Wanted(())
    assert sorted(kinds(reconcile(nothing, [worker(0), worker(1)]))) == [("Drain", "m-0"), ("Drain", "m-1")]
    assert reconcile(nothing, [worker(0, "draining")]) == []
    assert kinds(reconcile(nothing, [worker(0, "drained")])) == [("Remove", "m-0")]


def test_an_operators_drain_ends_a_worker_and_another_takes_its_place_at_once():
    leaving = frozenset({"m-0"})
    two = [worker(0), worker(1)]
    assert kinds(reconcile(wanted(2, leaving=leaving), two)) == [("Drain", "m-0"), ("Start", "m-2")]
    assert reconcile(wanted(1, leaving=leaving), [worker(0, "draining"), worker(1, "pending")]) == []
    drained = [worker(0, "drained"), worker(1)]
    assert kinds(reconcile(wanted(1, leaving=leaving), drained)) == [("Remove", "m-0")]


def test_the_last_that_serves_leaves_when_another_serves_or_does_not_come():
    leaving = wanted(1, leaving=frozenset({"m-0"}))
    assert kinds(reconcile(leaving, [worker(0)])) == [("Start", "m-1")]
    drained = [("Drain", "m-0")]
    for phase, longest_s in (("pending", LONGEST_WAIT_S), ("starting", LONGEST_WAIT_S), ("lost", LOST_S)):
        assert reconcile(leaving, [worker(0), worker(1, phase, phase_s=longest_s - 1)]) == []
        late = kinds(reconcile(leaving, [worker(0), worker(1, phase, phase_s=longest_s)]))
        assert late == [*drained, *([("Restart", "m-1")] if phase == "lost" else [])]
    assert kinds(reconcile(leaving, [worker(0), worker(1)])) == drained
    assert kinds(reconcile(leaving, [worker(0), worker(1, "failed")])) == drained
    parked = wanted(0, leaving=frozenset({"m-0"}))
    assert kinds(reconcile(parked, [worker(0)])) == drained, "nobody is to follow"


def test_the_last_that_serves_on_a_machine_that_is_emptied_waits_a_minute_at_most():
    """The machine may be taken away, whatever is still loading elsewhere."""
    gone = frozenset({"m-0"})
    leaving = wanted(1, leaving=gone, hurried={"m-0": PATIENCE_S})
    for phase in ("pending", "starting"):
        assert reconcile(leaving, [worker(0), worker(1, phase, phase_s=PATIENCE_S - 1)]) == []
        assert kinds(reconcile(leaving, [worker(0), worker(1, phase, phase_s=PATIENCE_S)])) == [("Drain", "m-0")]
        with_notice = wanted(1, leaving=gone, hurried={"m-0": LONGEST_WAIT_S})
        assert reconcile(with_notice, [worker(0), worker(1, phase, phase_s=LONGEST_WAIT_S - 1)]) == []


def test_of_several_that_leave_the_one_that_has_time_is_the_last():
    leaving = wanted(2, leaving=frozenset({"m-0", "m-1"}), hurried={"m-0": LONGEST_WAIT_S})
    loading = [worker(2, "starting", phase_s=100.0), worker(3, "starting", phase_s=100.0)]
    assert kinds(reconcile(leaving, [worker(0), worker(1), *loading])) == [("Drain", "m-0")]


def test_of_several_that_leave_one_stays_until_it_is_succeeded():
    leaving = wanted(2, leaving=frozenset({"m-0", "m-1"}))
    first = kinds(reconcile(leaving, [worker(0), worker(1)]))
    assert first == [("Drain", "m-1"), ("Start", "m-2"), ("Start", "m-3")]
    later = [worker(0), worker(1, "draining"), worker(2, "starting"), worker(3, "pending")]
    assert reconcile(leaving, later) == []
    assert kinds(reconcile(leaving, [*later[:2], worker(2), later[3]])) == [("Drain", "m-0")]


def test_a_router_that_shall_leave_goes_at_once_because_its_port_is_its_successors():
    group = Wanted((Group("router", 1, "a", surge=0),), frozenset({"router-0"}))
    assert kinds(reconcile(group, [Member("router-0", "router", "a", "serving")])) == [("Drain", "router-0")]


def test_a_worker_that_somebody_drained_past_the_supervisor_is_replaced():
    assert kinds(reconcile(wanted(1), [worker(0, "draining")])) == [("Start", "m-1")]
    assert kinds(reconcile(wanted(1), [worker(0, "drained"), worker(1)])) == [("Remove", "m-0")]


def test_a_restart_drains_first_and_keeps_the_place():
    asked = frozenset({"m-0"})
    assert kinds(reconcile(wanted(1, restarting=asked), [worker(0)])) == [("Drain", "m-0")]
    assert reconcile(wanted(1, restarting=asked), [worker(0, "draining")]) == []
    assert kinds(reconcile(wanted(1, restarting=asked), [worker(0, "drained")])) == [("Restart", "m-0")]
    assert kinds(reconcile(wanted(1, restarting=asked), [worker(0, "failed")])) == [("Restart", "m-0")]


def test_what_failed_is_restarted_each_time_later():
    assert reconcile(wanted(1), [worker(0, "failed", phase_s=1.0, failures=1)]) == []
    assert kinds(reconcile(wanted(1), [worker(0, "failed", phase_s=2.0, failures=1)])) == [("Restart", "m-0")]
    assert reconcile(wanted(1), [worker(0, "failed", phase_s=3.0, failures=2)]) == []
    assert pause_s(50) == 60.0


def test_what_does_not_answer_for_long_is_restarted_and_what_is_gone_is_made_anew():
    assert reconcile(wanted(1), [worker(0, "lost", phase_s=LOST_S - 1)]) == []
    assert kinds(reconcile(wanted(1), [worker(0, "lost", phase_s=LOST_S)])) == [("Restart", "m-0")]
    assert kinds(reconcile(wanted(1), [worker(0, "gone")])) == [("Remove", "m-0"), ("Start", "m-1")]


def test_other_settings_replace_one_at_a_time_the_new_one_first():
    old = [worker(0), worker(1)]
    assert kinds(reconcile(wanted(2, "b"), old)) == [("Start", "m-2")]
    assert reconcile(wanted(2, "b"), [*old, worker(2, "starting", "b")]) == []
    assert kinds(reconcile(wanted(2, "b"), [*old, worker(2, "serving", "b")])) == [("Drain", "m-0"), ("Start", "m-3")]


def test_a_new_worker_that_has_failed_replaces_nobody_until_it_serves_for_a_while():
    """Workers that served for seconds between their crashes replaced all of the old ones."""
    old = [worker(0), worker(1)]
    assert reconcile(wanted(2, "b"), [*old, worker(2, revision="b", failures=1)]) == []
    assert Drain("m-0", "its settings have changed") in reconcile(wanted(2, "b"), [*old, worker(2, revision="b")])


def test_an_old_worker_that_does_not_answer_for_a_moment_is_not_cut():
    """It may have streams running; when it has been silent for long, it goes, and does not start again before."""
    silent = worker(1, "lost", phase_s=LOST_S - 1)
    successor = worker(2, "serving", "b")
    assert kinds(reconcile(wanted(2, "b"), [worker(0), silent])) == [("Start", "m-2")]
    assert reconcile(wanted(2, "b"), [worker(0), silent, successor]) == []
    late = replace(silent, phase_s=LOST_S)
    assert kinds(reconcile(wanted(2, "b"), [worker(0), late, successor])) == [("Remove", "m-1"), ("Start", "m-3")]


def test_where_there_is_no_room_for_one_more_an_old_one_makes_room():
    old = [worker(0), worker(1)]
    successor = worker(2, "pending", "b", phase_s=PATIENCE_S - 1)
    assert reconcile(wanted(2, "b"), [*old, successor]) == []
    actions = reconcile(wanted(2, "b"), [*old, replace(successor, phase_s=PATIENCE_S)])
    assert [each for each in kinds(actions) if each[0] != "Start"] == [("Drain", "m-0")]


def test_the_last_that_serves_makes_no_room_while_a_node_may_be_on_its_way():
    """Ray's autoscaler takes minutes: until then nobody would serve the model."""
    old, successor = worker(0), worker(1, "pending", "b", phase_s=LONGEST_WAIT_S - 1)
    assert reconcile(wanted(1, "b"), [old, successor]) == []
    late = reconcile(wanted(1, "b"), [old, replace(successor, phase_s=LONGEST_WAIT_S)])
    assert kinds(late) == [("Drain", "m-0")]


def test_an_operator_lets_the_last_that_serves_go_at_once():
    gone = frozenset({"m-0"})
    waiting = worker(1, "pending")
    assert reconcile(wanted(1, leaving=gone), [worker(0), waiting]) == []
    assert kinds(reconcile(wanted(1, leaving=gone, unheld=gone), [worker(0), waiting])) == [("Drain", "m-0")]
    assert kinds(reconcile(wanted(1, "b", leaving=gone, unheld=gone), [worker(0)])) == [
        ("Drain", "m-0"),
        ("Start", "m-1"),
    ]


def test_routers_are_replaced_in_place_because_clients_know_their_ports():
    group = Wanted((Group("router", 2, "b", surge=0),))
    old = [Member(f"router-{number}", "router", "a", "serving") for number in range(2)]
    assert kinds(reconcile(group, old)) == [("Drain", "router-0")]
    drained = [replace(old[0], phase="drained"), old[1]]
    leaving = replace(group, leaving=frozenset({"router-0"}))
    assert ("Remove", "router-0") in kinds(reconcile(leaving, drained))
    started = [Member("router-0", "router", "b", "starting"), old[1]]
    assert reconcile(group, started) == []
    assert kinds(reconcile(group, [replace(started[0], phase="serving"), old[1]])) == [("Drain", "router-1")]


def test_a_name_is_the_lowest_that_is_free():
    assert list(islice(free_names("a/b", {"a/b-0", "a/b-2"}), 2)) == ["a/b-1", "a/b-3"]


def test_a_fleet_of_thousands_is_started_bit_by_bit():
    actions = reconcile(Wanted((Group("m", 10_000, "r"),)), [])
    assert [action.name for action in actions] == [f"m-{number}" for number in range(MOST_STARTS)]


@dataclass
class World:
    """Members that do as they are told, each in its own time; a cluster with so many places."""

    places: int
    members: dict[str, Member] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    restarting: set[str] = field(default_factory=set)

    def act(self, actions: list[Action], group: Group) -> None:
        """Carry out, checking what must never be done."""
        assert len({action.name for action in actions}) == len(actions), "one thing at a time for each member"
        for action in actions:
            if isinstance(action, Start):
                assert action.name not in self.members
                self.members[action.name] = Member(action.name, group.name, group.revision, "pending")
                continue
            member = self.members[action.name]
            if isinstance(action, Drain):
                assert member.phase == "serving"
                if member.name not in self.restarting:
                    self.leaving.add(member.name)
                self._become(member, "draining")
            elif isinstance(action, Remove):
                assert member.phase not in ("serving", "draining"), f"removed while it was {member.phase}"
                del self.members[member.name]
                self.leaving.discard(member.name)
                self.restarting.discard(member.name)
            elif isinstance(action, Restart):
                assert member.phase in ("failed", "lost", "drained", "starting")
                self.restarting.discard(member.name)
                self._become(member, "pending")

    def step(self, seconds: float) -> None:
        """Time passes, and everybody gets one phase further."""
        placed = sum(member.phase not in ("pending", "gone") for member in self.members.values())
        further = {"starting": "serving", "draining": "drained", "pending": "starting"}
        for member in list(self.members.values()):
            if member.phase == "pending":
                placed += 1
                if placed > self.places:
                    self._become(member, "pending", member.phase_s + seconds)
                    continue
            self._become(member, further.get(member.phase, member.phase), member.phase_s + seconds)

    def _become(self, member: Member, phase: str, phase_s: float = 0.0) -> None:
        same = phase == member.phase
        self.members[member.name] = replace(member, phase=phase, phase_s=phase_s if same else 0.0)

    @property
    def serving(self) -> int:
        """How many take requests."""
        return sum(member.phase == "serving" for member in self.members.values())


PHASES = ["pending", "starting", "serving", "draining", "drained", "failed", "lost", "gone"]
members = st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from("ab"), st.integers(0, 3)), max_size=7).map(
    lambda rows: {f"m-{n}": worker(n, phase, rev, running_requests=run) for n, (phase, rev, run) in enumerate(rows)}
)


@given(members, st.integers(0, 5), st.integers(0, 1), st.integers(1, 6), st.data())
def test_any_fleet_becomes_what_is_wanted_and_never_serves_less_than_that_for_it(
    start: dict[str, Member], count: int, surge: int, places: int, data: st.DataObject
) -> None:
    """Members are lost and fail for a while; nothing that serves is removed before it was drained, and no order of ours
    leaves fewer serving than wanted (where there is room for a successor)."""
    world = World(max(places, count + surge), dict(start))
    group = Group("m", count, "b", surge)
    for _ in range(6):
        before = world.serving
        actions = reconcile(Wanted((group,), frozenset(world.leaving)), list(world.members.values()))
        drained = sum(isinstance(action, Drain) for action in actions)
        waited = any(m.phase == "pending" and m.phase_s >= PATIENCE_S for m in world.members.values())
        if drained and not waited:
            assert before - drained >= min(before - 1, count - (1 - surge))
        world.act(actions, group)
        world.step(data.draw(st.sampled_from([1.0, 40.0])))
        for name in list(world.members):
            trouble = data.draw(st.sampled_from([None, None, None, None, "lost", "failed", "gone"]))
            if trouble:
                world.members[name] = replace(world.members[name], phase=trouble, phase_s=0.0)
    for _ in range(8 * (count + len(start) + 2)):
        world.act(reconcile(Wanted((group,), frozenset(world.leaving)), list(world.members.values())), group)
        world.step(40.0)
    assert [(m.phase, m.revision) for m in world.members.values()] == [("serving", "b")] * count


@given(st.integers(1, 4), st.integers(0, 1))
def test_new_settings_reach_every_member_where_there_is_no_place_to_spare(count: int, surge: int) -> None:
    world = World(count, {f"m-{n}": worker(n, "serving", "a") for n in range(count)})
    group = Group("m", count, "b", surge)
    for _ in range(30 * count):
        world.act(reconcile(Wanted((group,), frozenset(world.leaving)), list(world.members.values())), group)
        world.step(10.0 if count > 1 else LONGEST_WAIT_S / 3)
        assert world.serving >= count - 1
    assert {(m.phase, m.revision) for m in world.members.values()} == {("serving", "b")}


@given(members, st.integers(1, 4), st.sets(st.integers(0, 6)))
def test_whoever_shall_leave_has_left_in_the_end_and_the_last_that_serves_not_before_another(
    start: dict[str, Member], count: int, numbers: set[int]
) -> None:
    start = {name: member for name, member in start.items() if member.phase not in ("failed", "lost")}
    leaving = {f"m-{number}" for number in numbers} & start.keys()
    world = World(len(start) + count + 1, dict(start), set(leaving))
    group = Group("m", count, "b")
    for _ in range(8 * (count + len(start) + 2)):
        before = world.serving
        world.act(reconcile(Wanted((group,), frozenset(world.leaving)), list(world.members.values())), group)
        assert before == 0 or world.serving > 0, "there is room for successors, and they start at once"
        world.step(1.0)
    assert [(m.phase, m.revision) for m in world.members.values()] == [("serving", "b")] * count


def test_of_too_many_none_is_ended_that_is_silent_for_a_moment():
    """It may have streams; it is drained when it answers, or removed when it is lost for good."""
    assert reconcile(wanted(1), [worker(0), worker(1, "lost", phase_s=LOST_S - 1)]) == []
    assert kinds(reconcile(wanted(1), [worker(0), worker(1, "lost", phase_s=LOST_S)])) == [("Remove", "m-1")]
    assert kinds(reconcile(wanted(1), [worker(0), worker(1), worker(2, "lost")])) == [("Drain", "m-1")]
