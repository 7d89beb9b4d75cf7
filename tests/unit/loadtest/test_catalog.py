"""Named workloads are sized for the fleet."""

import pytest

from loadtest.catalog import CATALOG, WORKING_SET_PREFIX, Size, number_told
from loadtest.workloads import ceiling

SIZE = Size(num_workers=4, kv_tokens=400_000, num_requests=400, requests_per_s=20.0)


@pytest.mark.parametrize("name", CATALOG)
def test_every_workload_can_be_made_with_about_as_many_requests_as_wanted(name: str):
    arrivals = CATALOG[name].make(SIZE).arrivals(vocab_size=1000, seed=0)
    if name == "published":
        assert len(arrivals) == 1024
    else:
        assert 0.6 * 400 <= len(arrivals) <= 1.4 * 400


@pytest.mark.parametrize("name", CATALOG)
def test_requests_come_at_the_rate_asked_for_or_all_at_once(name: str):
    arrivals = CATALOG[name].make(SIZE).arrivals(vocab_size=1000, seed=0)
    if not CATALOG[name].has_rate:
        assert arrivals[-1].at_s == 0
    elif name == "chat":
        # Chats begin at the rate that gives it; the last of them goes on for a while.
        assert sum(len(arrival.runs) == 2 for arrival in arrivals) == 50
        assert max(arrival.at_s for arrival in arrivals if len(arrival.runs) == 2) == pytest.approx(50 / 2.5, rel=0.3)
    else:
        assert len(arrivals) / arrivals[-1].at_s == pytest.approx(20.0, rel=0.35)


def test_a_single_request_is_a_workload_too_as_far_as_its_kind_allows():
    size = Size(num_workers=1, kv_tokens=WORKING_SET_PREFIX, num_requests=1, requests_per_s=20.0)
    counts = {name: len(entry.make(size).arrivals(vocab_size=1000, seed=0)) for name, entry in CATALOG.items()}
    assert (counts["bursts"], counts["chat"]) == (8, 8)
    assert min(counts.values()) >= 1


@pytest.mark.parametrize("factor", [0.5, 0.75, 1.5])
def test_a_working_set_takes_its_part_of_the_fleets_kv(factor: float):
    arrivals = CATALOG[f"working-set-{factor:g}"].make(SIZE).arrivals(vocab_size=1000, seed=0)
    prefixes = {arrival.runs[0].name for arrival in arrivals}
    assert len(prefixes) * WORKING_SET_PREFIX == pytest.approx(factor * SIZE.kv_tokens, rel=0.05)
    assert len(arrivals) >= 4 * len(prefixes)


def test_a_working_set_grows_the_number_of_requests_where_it_must():
    large = Size(num_workers=8, kv_tokens=4_000_000, num_requests=100, requests_per_s=20.0)
    arrivals = CATALOG["working-set-1.5"].make(large).arrivals(vocab_size=1000, seed=0)
    assert len(arrivals) == 4 * round(1.5 * 4_000_000 / WORKING_SET_PREFIX)


def test_ceilings_are_what_the_names_promise():
    ceilings = {name: ceiling(CATALOG[name].make(SIZE).arrivals(vocab_size=1000, seed=0)) for name in CATALOG}
    assert ceilings["zero-reuse"] == 0
    assert ceilings["published"] == pytest.approx(2048 / 2176 * 15 / 16)
    assert ceilings["bursts"] == pytest.approx(6016 / 6272 * 7 / 8)
    assert ceilings["hot-prefix"] > 0.96
    assert all(share > 0.6 for name, share in ceilings.items() if name != "zero-reuse")


def test_a_number_that_is_not_the_one_asked_for_says_why():
    assert number_told(400, 400) == "400"
    assert number_told(384, 400) == "384 (asked for: 400; groups are whole)"
