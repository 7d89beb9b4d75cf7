from __future__ import annotations

import gc

from radixfleet.garbage import settle_in


def test_what_lives_after_the_start_is_never_collected_again() -> None:
    settle_in()
    try:
        assert gc.get_freeze_count() > 1_000
    finally:
        gc.unfreeze()
