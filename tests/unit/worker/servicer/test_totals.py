"""What a worker tells of all that it has done."""

from radixfleet.rates import Totals
from worker.engine.counters import LoopCounters
from worker.scheduling.counters import Counters
from worker.servicer.totals import TotalsKeeper


def test_every_number_comes_from_a_counter_of_the_engine():
    """A counter that is renamed there would be 0 here for ever."""
    names = (Counters().as_dict() | LoopCounters().as_dict()).keys()
    told = TotalsKeeper().totals(dict.fromkeys(names, 7.0))
    numbers = {name: getattr(told, name) for name in Totals.__dataclass_fields__ if name != "ttft_counts"}
    assert numbers.pop("out_of_memory") == 21  # of three stages
    assert set(numbers.values()) == {7}


def test_first_tokens_are_counted_until_the_engine_restarts():
    keeper = TotalsKeeper()
    for ttft_s in (0.004, 0.3, 1000.0):
        keeper.first_token(ttft_s)
    counts = keeper.totals({}).ttft_counts
    assert sum(counts) == 3
    assert (counts[0], counts[-1]) == (1, 1)
    keeper.restart()
    assert keeper.totals({}) == Totals()
