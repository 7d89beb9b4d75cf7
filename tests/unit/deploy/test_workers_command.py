"""`radixfleet workers --watch`, `drain`, `resume` and `remove`, against a router that writes down what it is asked."""

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest

from radixfleet.channel import listen, make_server
from radixfleet.errors import PermissionDenied, Unavailable, UnknownWorker
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2

ROUTER_ANEW = "the router was started again: what its workers do is told when it knows them"


def entry(worker_id: str, model: str, ineligible_reason: str) -> fleet_pb2.WorkerEntry:
    listed = fleet_pb2.WorkerEntry(
        worker_id=worker_id, address=f"{worker_id}:1", connected=True, ineligible_reason=ineligible_reason
    )
    listed.status = worker_pb2.WORKER_STATUS_SERVING
    listed.info.incarnation = 1
    listed.info.model.model = model
    return listed


class FakeFleet(fleet_pb2_grpc.FleetServicer):
    """Knows worker w1 and, where it is guarded, one key."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.drained: list[tuple[str, float | None]] = []
        self.resumed: list[str] = []
        self.removed: list[str] = []
        self.is_resumed_meanwhile = False
        self.updates: list[fleet_pb2.FleetUpdate] = []
        self.listed = [entry("w1", "a-model", "draining"), entry("w2", "a-model", "")]

    async def ListWorkers(self, request, context):
        return fleet_pb2.ListWorkersResponse(workers=self.listed)

    async def Explain(self, request, context):
        candidates = [fleet_pb2.Candidate(worker_id=name, eligible=True) for name in ("w2", "w0", "w1")]
        return fleet_pb2.ExplainResponse(worker_id="w1", candidates=candidates)

    async def WatchFleet(self, request, context):
        yield fleet_pb2.FleetUpdate(snapshot=True, workers=self.listed)
        for update in self.updates:
            yield update
        raise Unavailable("the router stops: watch another one")

    async def Drain(self, request, context):
        self._check(request.worker_id, context)
        self.drained.append((request.worker_id, request.grace_s if request.HasField("grace_s") else None))
        return worker_pb2.DrainResponse(finished_requests=2, aborted_requests=1, resumed=self.is_resumed_meanwhile)

    async def Resume(self, request, context):
        self._check(request.worker_id, context)
        self.resumed.append(request.worker_id)
        return worker_pb2.ResumeResponse()

    async def Remove(self, request, context):
        self._check(request.worker_id, context)
        self.removed.append(request.worker_id)
        return fleet_pb2.RemoveResponse()

    def _check(self, worker_id, context):
        sent = dict(context.invocation_metadata()).get("authorization")
        if self.key is not None and sent != f"Bearer {self.key}":
            raise PermissionDenied("only an operator may do this: call with the admin token")
        if worker_id != "w1":
            raise UnknownWorker(f"no worker {worker_id}")


@pytest.fixture
def fleet() -> Iterator[tuple[FakeFleet, str]]:
    """The fake and its address. It is served by a thread of its own: the command runs its own event loop in ours."""
    fake, loop = FakeFleet(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start():
        server, _ = await make_server(["radixfleet.v1.Fleet"])
        fleet_pb2_grpc.add_FleetServicer_to_server(fake, server)
        port = listen(server, "127.0.0.1", 0)
        await server.start()
        return server, f"127.0.0.1:{port}"

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield fake, address
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_workers_that_told_no_memory_are_not_in_its_table(radixfleet, fleet):
    """Engines with OpenAI's API and addresses that never answered had rows of 0 B, the latter without a name."""
    fake, address = fleet
    assert "weights" not in radixfleet("workers", "--endpoint", address)[1]
    fake.listed[0].info.memory.total_bytes = 2**30
    fake.listed.append(fleet_pb2.WorkerEntry(address="h:9"))
    _, out, _ = radixfleet("workers", "--endpoint", address)
    assert [line.split()[0] for line in out.partition("weights")[2].splitlines()[1:]] == ["w1"]


def test_candidates_are_in_the_order_of_their_names(radixfleet, fleet):
    _, address = fleet
    _, out, _ = radixfleet("explain", "hi", "--endpoint", address)
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["w0", "->", "w2"]


@pytest.fixture
def _long(monkeypatch):
    """An answer that comes at once may take long on a busy machine."""
    monkeypatch.setattr("deploy.commands.workers._QUIET_S", 60.0)


@pytest.mark.usefixtures("_long")
def test_a_worker_is_drained_and_resumed(radixfleet, fleet):
    """Behaviour 54, from the command line."""
    fake, address = fleet
    code, out, err = radixfleet("workers", "drain", "w1", "--grace", "2.5", "--endpoint", address)
    assert (code, fake.drained) == (0, [("w1", 2.5)])
    assert err == "", "it was empty at once"
    assert "2 requests finished, 1 aborted" in out
    assert "radixfleet workers resume w1" in out
    code, out, _ = radixfleet("workers", "resume", "w1", "--endpoint", address)
    assert (code, fake.resumed, out) == (0, ["w1"], "w1 serves again\n")


def test_a_worker_is_removed(radixfleet, fleet):
    fake, address = fleet
    assert radixfleet("workers", "remove", "w1", "--endpoint", address) == (0, "w1 is removed\n", "")
    assert fake.removed == ["w1"]
    assert radixfleet("workers", "remove", "nobody", "--endpoint", address) == (4, "", "radixfleet: no worker nobody\n")
    assert fake.removed == ["w1"]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("", "w1 was not drained: it serves, as it did\n"),
        ("loading", "w1 is not drained, but gets no requests yet: loading\n"),
    ],
)
def test_resuming_a_worker_that_was_not_drained_says_so(radixfleet, fleet, reason, told):
    fake, address = fleet
    fake.listed = [entry("w1", "a-model", reason)]
    code, out, _ = radixfleet("workers", "resume", "w1", "--endpoint", address)
    assert (code, fake.resumed, out) == (0, ["w1"], told)


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize("others", [[], [entry("w2", "a-model", "loading"), entry("w3", "another", "")]])
def test_who_drains_the_last_worker_of_a_model_is_told(radixfleet, fleet, others):
    fake, address = fleet
    fake.listed[1:] = others
    code, _, err = radixfleet("workers", "drain", "w1", "--endpoint", address)
    assert (code, err) == (0, "nobody serves a-model now: its requests are refused until a worker is back\n")


def test_a_drain_that_takes_its_time_says_so(radixfleet, fleet, monkeypatch):
    monkeypatch.setattr("deploy.commands.workers._QUIET_S", 0.0)
    code, out, err = radixfleet("workers", "drain", "w1", "--endpoint", fleet[1])
    assert (code, err) == (0, "draining w1: it gets nothing new; waiting for what it runs\n")
    assert "w1 is empty" in out


def test_a_script_gets_one_object_and_the_workers_own_grace(radixfleet, fleet):
    fake, address = fleet
    code, out, err = radixfleet("workers", "drain", "w1", "--json", "--endpoint", address)
    assert (code, err, fake.drained) == (0, "", [("w1", None)])
    assert json.loads(out) == {"worker": "w1", "finished_requests": 2, "aborted_requests": 1, "resumed": False}


@pytest.mark.usefixtures("_long")
def test_a_worker_that_somebody_resumed_while_it_drained_is_not_empty(radixfleet, fleet):
    fake, address = fleet
    fake.is_resumed_meanwhile = True
    code, out, err = radixfleet("workers", "drain", "w1", "--endpoint", address)
    assert (code, out) == (1, "")
    assert "w1 was resumed meanwhile, is not empty: 2 requests finished, 1 aborted" in err
    code, out, err = radixfleet("workers", "drain", "w1", "--json", "--endpoint", address)
    assert (code, json.loads(out)["resumed"]) == (1, True)
    assert "w1 was resumed meanwhile" in err


@pytest.mark.parametrize("command", ["drain", "resume"])
def test_a_guarded_fleet_asks_for_the_admin_token(radixfleet, fleet, tmp_path, command):
    fake, address = fleet
    fake.key = "a-token"
    code, _, err = radixfleet("workers", command, "w1", "--endpoint", address)
    assert (code, fake.drained, fake.resumed) == (4, [], [])
    assert "admin token" in err
    token = tmp_path / "token"
    token.write_text("a-token\n")
    code, _, _ = radixfleet("workers", command, "w1", "--api-key", f"@{token}", "--endpoint", address)
    assert code == 0


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize("command", ["drain", "resume"])
def test_a_worker_that_nobody_knows_is_refused_by_name(radixfleet, fleet, command):
    code, _, err = radixfleet("workers", command, "w-1", "--endpoint", fleet[1])
    assert code == 4
    assert "no worker w-1" in err
    assert "draining" not in err, "it is not"


def test_an_endpoint_in_front_of_the_subcommand_is_not_lost_in_silence(radixfleet, fleet):
    fake, address = fleet
    code, _, err = radixfleet("workers", "--endpoint", address, "drain", "w1")
    assert (code, fake.drained) == (2, [])
    assert "give --endpoint behind drain" in err


def test_a_grace_that_is_no_time_is_refused(radixfleet, fleet):
    for grace in ("nan", "-1", "inf"):
        assert radixfleet("workers", "drain", "w1", "--grace", grace, "--endpoint", fleet[1])[0] == 2
    assert fleet[0].drained == []


def test_a_watched_fleet_is_a_table_and_then_a_line_for_each_change(radixfleet, fleet):
    fake, address = fleet
    fake.listed = [entry("w1", "a-model", "")]
    lost, anew, busy = (entry("w1", "a-model", "") for _ in range(3))
    lost.connected, lost.ineligible_reason = False, "no connection"
    anew.info.incarnation = 2
    busy.info.incarnation = 2
    busy.load.running_requests = 3
    fake.updates = [
        fleet_pb2.FleetUpdate(workers=[lost]),
        fleet_pb2.FleetUpdate(workers=[anew, entry("w2", "a-model", "loading")]),
        fleet_pb2.FleetUpdate(workers=[busy]),
        fleet_pb2.FleetUpdate(removed=["w2:1"]),
    ]
    code, out, err = radixfleet("workers", "--watch", "--endpoint", address)
    assert (code, "the router stops" in err) == (3, True)
    table, _, told = out.partition("\n\n")
    assert "w1:1" in table
    assert [line.split("  ", 1)[1] for line in told.splitlines()] == [
        "w1: disconnected (no connection), was serving",
        "w1: serving, was disconnected (no connection)",
        "w1: its engine was started again, with an empty cache",
        "w2: new, serving (loading)",
        "w2: left the fleet",
    ]


def test_a_worker_that_was_started_again_is_told_in_one_line(radixfleet, fleet):
    fake, address = fleet
    fake.listed = [entry("w1", "a-model", ""), entry("w2", "a-model", "")]
    again, unnamed, named = (entry("w1", "a-model", "loading") for _ in range(3))
    again.address, unnamed.address, named.address = "w1:2", "w1:3", "w1:3"
    unnamed.worker_id = ""
    fake.updates = [
        fleet_pb2.FleetUpdate(workers=[again], removed=["w1:1"]),
        fleet_pb2.FleetUpdate(workers=[unnamed]),
        fleet_pb2.FleetUpdate(workers=[named], removed=["w1:2"]),
        fleet_pb2.FleetUpdate(workers=[entry("w3", "a-model", "")], removed=["w2:1"]),
    ]
    _, out, _ = radixfleet("workers", "--watch", "--endpoint", address)
    assert [line.split("  ", 1)[1] for line in out.partition("\n\n")[2].splitlines()] == [
        "w1: was started again, serving (loading)",
        "w1: was started again, serving (loading)",
        "w2: left the fleet",
        "w3: new, serving",
    ]


def test_of_two_workers_of_one_name_the_other_was_not_started_again(radixfleet, fleet):
    fake, address = fleet
    twin = entry("w1", "a-model", "duplicate")
    twin.address = "w1:2"
    fake.listed = [entry("w1", "a-model", ""), twin]
    fake.updates = [fleet_pb2.FleetUpdate(removed=["w1:2"])]
    _, out, _ = radixfleet("workers", "--watch", "--endpoint", address)
    assert out.rstrip().endswith("w1: left the fleet")


def test_a_router_that_was_started_again_is_told(radixfleet, fleet):
    fake, address = fleet
    fake.updates = [
        fleet_pb2.FleetUpdate(fleet={"uptime_s": 60.0}),
        fleet_pb2.FleetUpdate(snapshot=True, workers=fake.listed[:1], fleet={"uptime_s": 1.0}),
        fleet_pb2.FleetUpdate(fleet={"uptime_s": 14.0}),
        fleet_pb2.FleetUpdate(workers=[entry("w3", "a-model", "")], fleet={"uptime_s": 14.5}),
        fleet_pb2.FleetUpdate(fleet={"uptime_s": 16.0}),
        fleet_pb2.FleetUpdate(removed=["w3:1"], fleet={"uptime_s": 17.0}),
    ]
    _, out, _ = radixfleet("workers", "--watch", "--endpoint", address)
    assert [line.split("  ", 1)[1] for line in out.partition("\n\n")[2].splitlines()] == [
        ROUTER_ANEW,
        "w3: new, serving",
        "w2: left the fleet",
        "w3: left the fleet",
    ]


def unanswered(address: str) -> fleet_pb2.WorkerEntry:
    """As a router lists an address that it dials."""
    return fleet_pb2.WorkerEntry(address=address, ineligible_reason="never answered")


def told_of(radixfleet, fleet, *updates: fleet_pb2.FleetUpdate) -> list[str]:
    """What is told of two workers and a router that was started again a second ago, and then says `updates`."""
    fake, address = fleet
    fake.listed = [entry("w1", "a-model", ""), entry("w2", "a-model", "")]
    fake.updates = [fleet_pb2.FleetUpdate(fleet={"uptime_s": 60.0}), *updates]
    _, out, _ = radixfleet("workers", "--watch", "--endpoint", address)
    first, *lines = [line.split("  ", 1)[1] for line in out.partition("\n\n")[2].splitlines()]
    assert first == ROUTER_ANEW
    return lines


def anew(*workers: fleet_pb2.WorkerEntry) -> fleet_pb2.FleetUpdate:
    return fleet_pb2.FleetUpdate(snapshot=True, workers=workers, fleet={"uptime_s": 1.0})


def later(uptime_s: float, *workers: fleet_pb2.WorkerEntry) -> fleet_pb2.FleetUpdate:
    return fleet_pb2.FleetUpdate(workers=workers, fleet={"uptime_s": uptime_s})


def test_of_workers_that_a_new_router_has_to_find_again_nothing_is_told(radixfleet, fleet):
    """They are the same ones, and their caches are what they were."""
    w1, w2 = entry("w1", "a-model", ""), entry("w2", "a-model", "")
    unconnected = entry("w1", "a-model", "no connection")
    unconnected.connected = False
    assert told_of(radixfleet, fleet, anew(), later(2.0, unanswered("w1:1"))) == []
    found = [later(2.0, unanswered("w2:1")), later(2.5, unconnected), later(3.0, w1), later(4.0, w2), later(20.0)]
    assert told_of(radixfleet, fleet, anew(unanswered("w1:1")), *found) == []


def test_an_engine_that_was_started_again_beside_its_router_is_told(radixfleet, fleet):
    w1, w2 = entry("w1", "a-model", ""), entry("w2", "a-model", "")
    w2.info.incarnation = 2
    again = ["w2: its engine was started again, with an empty cache"]
    assert told_of(radixfleet, fleet, anew(unanswered("w1:1"), unanswered("w2:1")), later(2.0, w1, w2)) == again


def test_a_worker_that_was_started_again_beside_its_router_is_told_in_one_line(radixfleet, fleet):
    w1, w2 = entry("w1", "a-model", ""), entry("w2", "a-model", "")
    w1.address = "w1:2"
    found = [later(2.0, unanswered("w1:2")), later(3.0, w1), later(20.0)]
    assert told_of(radixfleet, fleet, anew(unanswered("w1:1"), w2), *found) == ["w1: was started again, serving"]


def test_a_worker_that_a_new_router_does_not_reach_is_told_by_its_name(radixfleet, fleet):
    w2 = entry("w2", "a-model", "")
    lines = told_of(
        radixfleet, fleet, anew(unanswered("w1:1"), w2), later(16.0), later(17.0, entry("w1", "a-model", ""))
    )
    assert lines == [
        "w1: disconnected (never answered), was serving",
        "w1: serving, was disconnected (never answered)",
    ]


def test_a_script_that_watches_gets_the_whole_list_in_a_line_each_time(radixfleet, fleet):
    fake, address = fleet
    fake.updates = [fleet_pb2.FleetUpdate(removed=["w2:1"])]
    code, out, _ = radixfleet("workers", "--watch", "--json", "--endpoint", address)
    assert code == 3
    assert [[worker["worker_id"] for worker in json.loads(line)["workers"]] for line in out.splitlines()] == [
        ["w1", "w2"],
        ["w1"],
    ]


@pytest.mark.parametrize(("awaited_s", "told"), [(0.0, ["waiting for the router at "]), (60.0, [])])
def test_who_watches_is_told_of_a_router_that_is_not_there_yet(radixfleet, fleet, monkeypatch, awaited_s, told):
    monkeypatch.setattr("deploy.commands.workers._AWAITED_S", awaited_s)
    _, out, err = radixfleet("workers", "--watch", "--endpoint", fleet[1])
    assert "w1:1" in out
    assert [line.removesuffix(fleet[1]) for line in err.splitlines() if "waiting" in line] == told


def test_who_watches_is_told_of_a_router_that_says_nothing_more(radixfleet, fleet, monkeypatch):
    monkeypatch.setattr("deploy.commands.workers._MISSED_S", 0.0)
    _, _, err = radixfleet("workers", "--watch", "--endpoint", fleet[1])
    assert f"nothing comes from the router at {fleet[1]}: waiting for it" in err


def test_watching_goes_with_the_list_alone(radixfleet, fleet):
    fake, address = fleet
    code, _, err = radixfleet("workers", "--watch", "drain", "w1", "--endpoint", address)
    assert (code, fake.drained) == (2, [])
    assert "radixfleet workers --watch" in err
