"""Options passed on to child processes, and each worker's share of the machine."""

import pytest
from click import UsageError

from deploy import machine
from deploy.options import to_arguments


def test_what_was_not_given_is_left_out_and_zero_and_false_are_not():
    values = {"model": "demo", "port": 0, "overlap": False, "inline": True, "threads": None, "routers": ()}
    assert to_arguments(values) == ["--model", "demo", "--port", "0", "--no-overlap", "--inline"]


def test_a_list_becomes_a_repeated_option():
    assert to_arguments({"routers": ("a:1", "b:2")}) == ["--routers", "a:1", "--routers", "b:2"]


@pytest.fixture
def two_cores_no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    monkeypatch.delenv("RADIXFLEET_WORKER_THREADS", raising=False)
    monkeypatch.delenv("RADIXFLEET_WORKER_DEVICE_MEMORY", raising=False)


@pytest.mark.parametrize(("num_workers", "threads"), [(1, 2), (2, 1), (5, 1)])
def test_workers_on_the_cpu_share_the_cores(two_cores_no_gpu, num_workers, threads):
    settings, environment = machine.worker_share(0, num_workers, None)
    assert settings["threads"] == threads
    assert environment == {}


def test_workers_on_the_cpu_share_the_memory(two_cores_no_gpu):
    one, four = (machine.worker_share(0, count, "cpu")[0]["device_memory"] for count in (1, 4))
    assert one == pytest.approx(4 * four, rel=0.2)


def test_the_environment_goes_before_the_share(two_cores_no_gpu, monkeypatch):
    monkeypatch.setenv("RADIXFLEET_WORKER_THREADS", "3")
    assert "threads" not in machine.worker_share(0, 2, None)[0]


def test_workers_on_gpus_get_one_each(monkeypatch):
    monkeypatch.setattr(machine, "num_gpus", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert machine.worker_share(1, 2, None) == ({}, {"CUDA_VISIBLE_DEVICES": "6"})


def test_more_workers_than_gpus_is_refused_unless_they_run_on_the_cpu(monkeypatch):
    monkeypatch.setattr(machine, "num_gpus", lambda: 1)
    with pytest.raises(UsageError, match="--workers 1"):
        machine.worker_share(0, 2, "auto")
    assert "threads" in machine.worker_share(0, 2, "cpu")[0]
