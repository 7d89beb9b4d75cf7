"""The supervisor's loop over members that live in this process, and over its own death."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

from deploy.fleet.books import Books, Record, load_books, save_books
from radixfleet.clock import ManualClock
from radixfleet.errors import InvalidRequest, UnknownWorker
from radixfleet.types import Load
from tests.support.played_members import Actor, FakeStore, Scene
from tests.support.waiting import until

FLEET = """
routers: {settings: {port: 7000}}
models:
  m:
    workers: {min: 2, max: 4}
    settings: {model: demo, runner: sim}
    scaling: {up_after_s: 0, down_after_s: 3600}
"""


@pytest.fixture
def scene() -> Scene:
    return Scene()


BASIC = ("router-0", "m-0", "m-1")


async def test_a_file_becomes_a_fleet_whose_workers_know_the_routers(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        status = await scene.settled(control, *BASIC)
        assert status["routers"] == ["10.0.0.1:7000"]
        assert status["models"]["m"] == {
            "wanted": 2,
            "min": 2,
            "max": 4,
            "serving": 2,
            "running_requests": 0,
            "queued_requests": 0,
        }
        await until(lambda: scene.hosting.actors["m-1"].routers == ["10.0.0.1:7000"])
        assert scene.hosting.actors["m-0"].settings["served_model_name"] == "m"


async def test_a_new_supervisor_goes_on_where_the_old_one_was(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.actors["m-0"].drains_by_itself = False
        await control.drain(["m-0"])
        await until(lambda: "drain m-0" in scene.hosting.done)
    del scene.hosting.actors["m-1"]  # it dies while nobody looks
    scene.hosting.actors["m-9"] = Actor({}, ())  # made by a supervisor that died before it wrote it down
    before = len(scene.hosting.done)
    async with scene.supervisor() as control:
        await until(lambda: "end m-9" in scene.hosting.done)
        scene.hosting.actors["m-0"].phase = "drained"
        await until(lambda: "end m-0" in scene.hosting.done)
        await scene.sees(control, lambda status: status["settled"])
        assert "start router-0" not in scene.hosting.done[before:], "the router that was there stayed"
        assert len(scene.hosting.actors) == 3


async def test_scaling_by_order_and_by_load(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        await control.scale("m", 3, 3)
        await scene.settled(control, *BASIC, "m-2")
        await control.scale("m", 1, 4)
        for actor in scene.hosting.actors.values():
            actor.load = Load(running_requests=4, waiting_requests=9)
        await scene.settled(control, *BASIC, "m-2", "m-3")
        with pytest.raises(InvalidRequest, match="there are m"):
            await control.scale("x", 1, 1)
        with pytest.raises(InvalidRequest, match="1 <= min <= max"):
            await control.scale("m", 3, 2)


async def test_a_fleet_that_was_told_to_grow_is_not_settled_until_it_has(scene: Scene) -> None:
    """Else whoever waits for it hears at once that it is done."""
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.held = {"m-2": asyncio.Event()}
        await control.scale("m", 3, 3)
        status = await control.status()
        assert (status["models"]["m"]["wanted"], status["settled"]) == (3, False)
        scene.hosting.held["m-2"].set()
        await scene.settled(control, *BASIC, "m-2")


async def test_restart_drains_and_keeps_the_member(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        await control.restart(["m-1", "router-0"])
        await until(lambda: scene.hosting.actors["m-1"].starts == 2 and scene.hosting.actors["router-0"].starts == 2)
        assert scene.hosting.done.index("drain m-1") < scene.hosting.done.index("restart m-1")
        status = await scene.settled(control, *BASIC)
        assert not any(member["restarting"] for member in status["members"])
        with pytest.raises(UnknownWorker, match="no member is called 'm-7'; there are: m-0, m-1, router-0"):
            await control.restart(["m-7"])


async def test_the_last_words_of_a_process_that_was_restarted_are_not_those_of_the_next(scene: Scene) -> None:
    """It says that it has drained: the member was removed for good, and another made in its place."""
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.actors["m-1"].lingers = True
        await control.restart(["m-1"])
        await until(lambda: "restart m-1" in scene.hosting.done and not scene.hosting.actors["m-1"].last_words)
        await scene.settled(control, *BASIC)
        assert "end m-1" not in scene.hosting.done


async def test_a_failed_worker_is_restarted_and_its_reason_shown_until_it_serves(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.actors["m-0"].phase, scene.hosting.actors["m-0"].message = "failed", "no such file"
        await scene.sees(control, lambda status: any(m["message"] == "no such file" for m in status["members"]))
        await until(lambda: scene.hosting.actors["m-0"].starts == 2)
        scene.hosting.actors["m-0"].message = ""
        await scene.sees(control, lambda status: not any(m["message"] for m in status["members"]))


async def test_no_worker_leaves_its_routers_while_one_of_them_is_unknown(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        await until(lambda: scene.hosting.actors["m-0"].routers == ["10.0.0.1:7000"])
    scene.hosting.actors["router-0"].lost = True
    async with scene.supervisor() as control:
        await scene.sees(control, lambda status: status["models"]["m"]["serving"] == 2)
        assert control.router_addresses() is None
        assert scene.hosting.actors["m-0"].routers == ["10.0.0.1:7000"]


async def test_a_worker_that_a_new_supervisor_has_not_heard_yet_is_not_taken_for_one_that_waits(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a place is made anew when another node is closed: it serves, and was killed."""
    monkeypatch.setattr("deploy.fleet.control._FIRST_SIGHT_S", 0.01)
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.actors["m-1"].node_id = "n9"
        await scene.sees(control, lambda status: any(m["node_id"] == "n9" for m in status["members"]))
        await until(lambda: b'"n9"' in (scene.store.data or b""))
    scene.hosting.actors["m-1"].lost = True
    async with scene.supervisor() as control:
        status = await control.status()
        assert [(m["phase"], m["node_id"]) for m in status["members"] if m["name"] == "m-1"] == [("lost", "n9")]
        assert await control.cordon("n8", undo=False) == []
        await scene.sees(control, lambda now: now["members"][-1]["phase_s"] > status["members"][-1]["phase_s"])
        assert not (await control.status())["members"][-1]["leaving"]
        assert await control.cordon("n9", undo=False) == ["m-1"]
        await until(lambda: "m-2" in scene.hosting.actors)
        assert "end m-1" not in scene.hosting.done, "it is drained when it answers again"
        scene.hosting.actors["m-1"].lost = False
        await scene.settled(control, "router-0", "m-0", "m-2")
        assert scene.hosting.done.index("drain m-1") < scene.hosting.done.index("end m-1")


async def test_an_emptied_node_gets_no_workers_until_that_is_undone(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.actors["m-1"].node_id = "n1"
        await scene.sees(control, lambda status: any(m["node_id"] == "n1" for m in status["members"]))
        assert await control.cordon("n1", undo=False) == ["m-1"]
        await scene.settled(control, "router-0", "m-0", "m-2")
        assert scene.hosting.actors["m-2"].avoid == ["n1"]
        assert await control.cordon("n1", undo=True) == []
        await control.scale("m", 3, 3)
        await until(lambda: len(scene.hosting.actors) == 4)
        assert scene.hosting.actors["m-1"].avoid == []


async def test_down_drains_workers_then_routers(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        await control.down(drain=True)
        await until(lambda: not scene.hosting.actors)
        done = scene.hosting.done
        assert max(done.index("end m-0"), done.index("end m-1")) < done.index("drain router-0")
        assert done.index("drain m-0") < done.index("end m-0")


async def test_down_at_once_drains_nobody(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        await control.down(drain=False)
        await until(lambda: not scene.hosting.actors)
        assert not any(word.startswith("drain") for word in scene.hosting.done)


async def test_other_settings_replace_every_worker_and_the_router_in_place(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        await control.apply(FLEET.replace("runner: sim", "runner: sim, page_size: 32").replace("7000", "7001"))
        await scene.sees(control, lambda status: status["settled"])
        workers = [actor for name, actor in scene.hosting.actors.items() if name.startswith("m-")]
        assert [actor.settings["page_size"] for actor in workers] == [32, 32]
        assert scene.hosting.actors["router-0"].settings["port"] == 7001
        await until(lambda: workers[0].routers == ["10.0.0.1:7001"])


async def test_more_workers_than_a_fleet_may_have_are_refused(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, "router-0", "m-0", "m-1")
        with pytest.raises(InvalidRequest, match="at most 10,000 workers; got 99,999,999,999"):
            await control.scale("m", 1, 99_999_999_999)
        await scene.settled(control, "router-0", "m-0", "m-1")


async def test_a_member_that_cannot_be_made_says_why_and_holds_up_nobody(scene: Scene) -> None:
    scene.hosting.impossible = {"n"}
    async with scene.supervisor() as control:
        await control.apply(FLEET + "  n: {workers: 1, settings: {model: demo, runner: sim}}\n")

        def is_told(status: dict[str, Any]) -> bool:
            serving = {each["name"] for each in status["members"] if each["phase"] == "serving"}
            why = [each["message"] for each in status["members"] if each["group"] == "n"]
            return serving == {"router-0", "m-0", "m-1"} and why == ["no half GPUs"]

        await scene.sees(control, is_told)
        scene.hosting.impossible = set()
        settled = await scene.sees(control, lambda status: bool(status["settled"]))
        assert settled["models"]["n"]["serving"] == 1


async def test_a_file_that_this_version_refuses_leaves_the_fleet_as_it_is_until_another_comes(scene: Scene) -> None:
    """After an upgrade, say. Neither may the supervisor die of it again and again, nor take the fleet down."""
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, "router-0", "m-0", "m-1")
    assert scene.store.data is not None
    scene.store.data = scene.store.data.replace(b"runner: sim", b"ranner: sim")
    scene.hosting.done.clear()
    async with scene.supervisor() as control:
        told = await scene.sees(control, lambda status: all(each["phase"] == "serving" for each in status["members"]))
        assert "its file is refused" in told["trouble"]
        assert "ranner" in told["trouble"]
        assert not told["settled"]
        assert scene.hosting.done == []
        await control.apply(FLEET)
        await scene.settled(control, "router-0", "m-0", "m-1")
        assert scene.hosting.done == []
        assert (await control.status())["trouble"] == ""


async def test_the_books_end_with_what_was_ordered_last_however_slow_the_store_is(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, "router-0", "m-0", "m-1")
        scene.store.first_waits = may_go_on = threading.Event()
        orders = [asyncio.create_task(control.scale("m", count, count)) for count in (3, 4)]
        await asyncio.sleep(0)
        await until(lambda: scene.store.waiting)
        may_go_on.set()
        await asyncio.gather(*orders)
    assert scene.store.data is not None
    assert b'"bounds":{"m":[4,4]}' in scene.store.data


async def test_nodes_that_have_left_are_not_avoided_for_ever(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, "router-0", "m-0", "m-1")
        await control.cordon("n8", undo=False)
        scene.hosting.there = {"n0", "n9"}
        await control.cordon("n9", undo=False)
        assert (await control.status())["cordoned_nodes"] == ["n9"]


async def test_an_order_is_heard_while_another_is_still_being_carried_out(scene: Scene) -> None:
    """A fleet of thousands is started one by one; whoever meant dozens need not wait for them."""
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, "router-0", "m-0", "m-1")
        await control.scale("m", 10_000, 10_000)
        await until(lambda: len(scene.hosting.actors) > 10)
        await control.scale("m", 2, 2)
        await scene.sees(control, lambda status: bool(status["settled"]))
        assert scene.hosting.done.count("start m-0") == 1
        assert sum(done.startswith("start m-") for done in scene.hosting.done) < 10_000


async def test_who_waits_for_a_place_hears_which_nodes_are_open_now(scene: Scene) -> None:
    """Else a worker that was made while all nodes were cordoned would wait for ever."""
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.is_full = True
        await control.scale("m", 3, 3)
        await until(lambda: "m-2" in scene.hosting.actors)
        await control.cordon("n9", undo=False)
        await until(lambda: any(list(actor.avoid) == ["n9"] for actor in scene.hosting.actors.values()))
        scene.hosting.is_full = False
        await control.cordon("n9", undo=True)
        status = await scene.sees(control, lambda status: bool(status["settled"]))
        made = {each["name"] for each in status["members"]} - set(BASIC)
        assert [list(scene.hosting.actors[name].avoid) for name in made] == [[]]


async def test_only_a_machine_that_is_emptied_hurries_the_last_of_a_model(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor loads for long: drained by name, it serves on; with its node, it leaves when it has waited."""
    scene.hosting.first_phase = "starting"
    async with scene.supervisor() as control:
        await control.apply(FLEET.replace("{min: 2, max: 4}", "1"))
        for name in ("router-0", "m-0"):
            await until(lambda name=name: name in scene.hosting.actors)
            scene.hosting.actors[name].phase = "serving"
        await scene.settled(control, "router-0", "m-0")
        scene.hosting.actors["m-0"].node_id = "n9"
        await control.drain(["m-0"])
        status = await scene.sees(control, lambda status: any(m["phase"] == "starting" for m in status["members"]))
        assert "drain m-0" not in scene.hosting.done
        # Not before: no patience at all would not wait for its successor to be placed either.
        monkeypatch.setattr("deploy.fleet.control.PATIENCE_S", 0.0)
        await scene.sees(control, lambda now: now["members"][-1]["phase_s"] > status["members"][-1]["phase_s"])
        assert "drain m-0" not in scene.hosting.done, "many turns later"
        await control.cordon("n9", undo=False)
        await until(lambda: "drain m-0" in scene.hosting.done)


async def test_the_last_of_a_model_serves_while_its_successor_waits_for_a_node_or_is_told_to_go(scene: Scene) -> None:
    """As with Ray's autoscaler, which takes minutes."""
    async with scene.supervisor() as control:
        await control.apply(FLEET.replace("{min: 2, max: 4}", "1"))
        await scene.settled(control, "router-0", "m-0")
        scene.hosting.is_full = True
        await control.drain(["m-0"])
        await scene.sees(control, lambda status: any(each["phase"] == "pending" for each in status["members"]))
        assert "drain m-0" not in scene.hosting.done
        await control.drain(["m-0"], now=True)
        await until(lambda: "drain m-0" in scene.hosting.done)


def test_the_order_to_go_at_once_outlives_the_supervisor_and_not_its_member() -> None:
    store, books = FakeStore(), Books(members={"m-0": Record("m", "a")}, leaving={"m-0"}, unheld={"m-0"})
    save_books(store, books)
    found = load_books(store)
    assert found.wanted(None).unheld == {"m-0"}
    found.forget("m-0")
    assert not found.unheld


async def test_a_worker_that_came_up_again_on_a_cordoned_node_leaves_it(scene: Scene) -> None:
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        await control.cordon("n9", undo=False)
        scene.hosting.actors["m-0"].node_id = "n9"
        await scene.settled(control, "router-0", "m-1", "m-2")
        assert list(scene.hosting.actors["m-2"].avoid) == ["n9"]


async def test_workers_leave_a_node_that_is_taken_away_and_none_starts_there(scene: Scene) -> None:
    """A spot instance, `ray drain-node`, SIGTERM to `ray start --block`: nobody else tells the fleet."""
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.actors["m-0"].node_id = "n9"
        scene.hosting.taken_away = {"n9": 29.0}
        await scene.settled(control, "router-0", "m-1", "m-2")
        assert "drain m-0" in scene.hosting.done
        assert list(scene.hosting.actors["m-2"].avoid) == ["n9"]
        status = await control.status()
        assert status["cordoned_nodes"] == [], "nobody has to open it again"
        assert status["draining_nodes"] == {"n9": 29.0}
        scene.hosting.taken_away = {"n9": math.inf}
        await scene.sees(control, lambda status: status["draining_nodes"] == {"n9": None})


async def test_the_last_of_a_model_leaves_a_node_while_there_is_time_for_what_runs(scene: Scene) -> None:
    scene.clock = clock = ManualClock()
    async with scene.supervisor() as control:
        await control.apply(FLEET.replace("{min: 2, max: 4}", "1"))
        await scene.settled(control, "router-0", "m-0")
        scene.hosting.is_full = True
        scene.hosting.actors["m-0"].node_id = "n9"
        scene.hosting.taken_away = {"n9": 120.0}
        await scene.sees(control, lambda status: any(each["phase"] == "pending" for each in status["members"]))
        for left_s in range(115, 30, -5):
            clock.advance(5.0)
            scene.hosting.taken_away = {"n9": float(left_s)}
            hosting, before = scene.hosting, scene.hosting.asked.copy()
            await until(lambda: min(hosting.asked[name] - before[name] for name in ("going", "m-0", "router-0")) > 1)  # noqa: B023
            assert "drain m-0" not in hosting.done, f"{left_s} s are left"
        scene.hosting.taken_away = {"n9": 30.0}
        await until(lambda: "drain m-0" in scene.hosting.done)


async def test_what_was_decided_before_an_order_is_not_begun_while_the_order_is_written_down(scene: Scene) -> None:
    """A model that is no longer in the file cannot be started any more, and may not end the supervisor."""
    with_n = FLEET + "  n: {workers: 3, settings: {model: demo, runner: sim}}\n"
    scene.hosting.held = {"n-0": asyncio.Event()}
    async with scene.supervisor() as control:
        await control.apply(with_n)
        await until(lambda: "n-0" in scene.hosting.being_made)
        scene.store.first_waits = may_go_on = threading.Event()
        order = asyncio.create_task(control.apply(FLEET))
        await until(lambda: scene.store.waiting)
        scene.hosting.held["n-0"].set()
        await until(lambda: "start n-0" in scene.hosting.done)
        await asyncio.sleep(0)
        may_go_on.set()
        await order
        await scene.settled(control, *BASIC)
    assert "start n-1" not in scene.hosting.done


async def test_nodes_that_are_emptied_at_the_same_time_are_all_remembered(scene: Scene) -> None:
    both = asyncio.Barrier(2)

    async def nodes() -> set[str]:
        await both.wait()
        return {"n0", "n8", "n9"}

    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await scene.settled(control, *BASIC)
        scene.hosting.nodes = nodes  # type: ignore[method-assign]
        await asyncio.gather(control.cordon("n8", undo=False), control.cordon("n9", undo=False))
        assert (await control.status())["cordoned_nodes"] == ["n8", "n9"]


async def test_who_is_being_made_while_all_is_taken_down_at_once_ends_too(scene: Scene) -> None:
    scene.hosting.held = {"m-1": asyncio.Event()}
    async with scene.supervisor() as control:
        await control.apply(FLEET)
        await until(lambda: "m-1" in scene.hosting.being_made)
        await control.down(drain=False)
        scene.hosting.held["m-1"].set()
        await until(lambda: "end m-1" in scene.hosting.done)
        status = await scene.sees(control, lambda status: not status["members"])
        assert scene.hosting.actors == {}, status
