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
    monkeypatch.setattr(machine, "gpu_names", list)
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


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """Makes a machine with so many cards, of which CUDA_VISIBLE_DEVICES lets some through."""

    def make(number, visible=None):
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{card}" for card in range(number))):
            (tmp_path / name).touch()
        monkeypatch.setattr(machine, "_DEVICE_FILES", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def test_workers_on_gpus_get_one_each(cards):
    cards(2, visible="4,6")
    assert machine.worker_share(1, 2, None) == ({}, {"CUDA_VISIBLE_DEVICES": "6"})


@pytest.mark.parametrize(
    ("number", "visible", "names"),
    [
        (0, None, []),
        (2, None, ["0", "1"]),
        (2, "1", ["1"]),
        (2, "", []),
        (2, "-1", []),
        (2, "0,-1,1", ["0"]),
        (2, "NoDevFiles", []),
        (1, "GPU-8932f937", ["GPU-8932f937"]),
        (1, "MIG-1a, MIG-2b", ["MIG-1a", "MIG-2b"]),
        (0, "MIG-1a", []),
    ],
)
def test_gpus_are_those_that_cuda_would_see(cards, number, visible, names):
    """Several slices of one card are as many GPUs; the list ends where CUDA's does."""
    cards(number, visible)
    assert machine.gpu_names() == names


def test_a_gpu_that_is_named_is_left_as_it_is(cards):
    """The worker opens it by that name, so it must go on seeing all of them; two workers cannot both have it."""
    cards(2)
    assert machine.worker_share(0, 1, "cuda:1") == ({}, {})
    with pytest.raises(UsageError, match="2 workers would share cuda:1"):
        machine.worker_share(0, 2, "cuda:1")


def test_more_workers_than_gpus_is_refused_unless_they_run_on_the_cpu(cards):
    cards(1)
    with pytest.raises(UsageError, match="--workers 1"):
        machine.worker_share(0, 2, "auto")
    assert "threads" in machine.worker_share(0, 2, "cpu")[0]
