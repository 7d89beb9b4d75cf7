"""Who may pass which door."""

from __future__ import annotations

import base64

import pytest

from radixfleet.clock import ManualClock
from radixfleet.errors import Overloaded, PermissionDenied, Unauthenticated
from radixfleet.guard import Caller, Door, Guard, key_of
from radixfleet.keys import key_hash
from radixfleet.limits import ClientLimits

KEY, TOKEN, WRONG = "rfk_client", "token-0123456789", "rfk_wrong"
RING = {key_hash(KEY): "alice"}


def keys() -> dict[str, str]:
    return RING


def tokens() -> list[str]:
    return ["newer-0123456789ab", TOKEN]


@pytest.mark.parametrize("door", list(Door))
@pytest.mark.parametrize("key", [None, KEY, WRONG])
def test_without_keys_and_token_everybody_passes_every_door(door: Door, key: str | None) -> None:
    assert Guard().admit(door, key) == Caller()


@pytest.mark.parametrize(
    ("door", "key", "outcome"),
    [
        (Door.OPEN, None, Caller()),
        (Door.OPEN, WRONG, Caller()),
        (Door.OPEN, KEY, Caller("alice")),
        (Door.CLIENT, None, Unauthenticated),
        (Door.CLIENT, WRONG, Unauthenticated),
        (Door.CLIENT, "", Unauthenticated),
        (Door.CLIENT, KEY, Caller("alice")),
        (Door.CLIENT, KEY + "x", Unauthenticated),
        (Door.CLIENT, key_hash(KEY), Unauthenticated),  # who has read the file has no key
        (Door.CLIENT, TOKEN, Caller("admin", is_admin=True)),
        (Door.ADMIN, None, Unauthenticated),
        (Door.ADMIN, WRONG, Unauthenticated),
        (Door.ADMIN, KEY, PermissionDenied),
        (Door.ADMIN, TOKEN, Caller("admin", is_admin=True)),
        (Door.ADMIN, "newer-0123456789ab", Caller("admin", is_admin=True)),
        (Door.ADMIN, TOKEN[:-1], Unauthenticated),
        (Door.ADMIN, "\udcff", Unauthenticated),
    ],
)
def test_doors_with_keys_and_tokens(door: Door, key: str | None, outcome: Caller | type[Exception]) -> None:
    guard = Guard(keys, tokens)
    if isinstance(outcome, Caller):
        assert guard.admit(door, key) == outcome
    else:
        with pytest.raises(outcome):
            guard.admit(door, key)


@pytest.mark.parametrize("closes", [True, False])
def test_a_token_without_keys_closes_the_doors_of_clients_on_workers_alone(closes: bool) -> None:
    guard = Guard(None, tokens, token_closes_client_doors=closes)
    with pytest.raises(Unauthenticated):
        guard.admit(Door.ADMIN, None)
    if closes:
        with pytest.raises(Unauthenticated):
            guard.admit(Door.CLIENT, None)
    else:
        assert guard.admit(Door.CLIENT, None) == Caller()


def test_no_message_shows_a_key() -> None:
    for door, key in ((Door.ADMIN, KEY), (Door.ADMIN, WRONG), (Door.CLIENT, WRONG)):
        with pytest.raises((Unauthenticated, PermissionDenied)) as caught:
            Guard(keys, tokens).admit(door, key)
        assert key not in str(caught.value)


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (None, None),
        ("", None),
        ("Bearer abc", "abc"),
        ("bearer   abc ", "abc"),
        ("Bearer", None),
        ("abc", None),
        ("Digest abc", None),
        (basic("me:abc"), "abc"),
        (basic(":a:b"), "a:b"),
        (basic("me:"), None),
        ("Basic !!!", None),
        ("Basic /w==", None),
    ],
)
def test_the_key_of_a_header(header: str | None, key: str | None) -> None:
    assert key_of(header) == key


def test_limits_count_a_key_wherever_it_calls_from_and_the_keyless_by_host() -> None:
    guard = Guard(limits=ClientLimits(ManualClock(), max_open_requests=1))
    alice = Caller("alice")
    with guard.visit(alice, "10.0.0.1"):
        with pytest.raises(Overloaded), guard.visit(alice, "10.0.0.2"):
            pass
        with (
            guard.visit(Caller(), "10.0.0.1"),
            guard.visit(Caller(), "10.0.0.2"),
            pytest.raises(Overloaded),
            guard.visit(Caller(), "10.0.0.1"),
        ):
            pass
    with guard.visit(alice, "10.0.0.1"):
        pass


def test_who_is_turned_away_is_told_of_once() -> None:
    heard: list[str] = []
    limits = ClientLimits(ManualClock(), max_open_requests=1)
    guard = Guard(keys, tokens, limits=limits, on_refusal=lambda error: heard.append(error.code))
    alice = guard.admit(Door.CLIENT, KEY)
    with pytest.raises(Unauthenticated):
        guard.admit(Door.CLIENT, WRONG)
    with pytest.raises(PermissionDenied):
        guard.admit(Door.ADMIN, KEY)
    with guard.visit(alice, "h"), pytest.raises(Overloaded), guard.visit(alice, "h"):
        pass
    with pytest.raises(Overloaded), guard.visit(alice, "h"):
        raise Overloaded("of the request itself, which was let in")
    assert heard == ["UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"]


def test_the_fleet_itself_has_no_limits() -> None:
    guard = Guard(limits=ClientLimits(ManualClock(), max_open_requests=1))
    admin = Caller("admin", is_admin=True)
    with guard.visit(admin, "h"), guard.visit(admin, "h"):
        pass
