"""Who may pass which door of a process: the decision, for gRPC and HTTP alike.

    door      without keys and token   client's key         admin token
    OPEN      passes                   passes               passes           health
    CLIENT    passes                   passes               passes           inference, and looking at the fleet
    ADMIN     passes                   PERMISSION_DENIED    passes           changing the fleet, and the Worker service

Once keys or a token are set, no key, or one that is not known, is UNAUTHENTICATED at the doors they close. A token
alone closes ADMIN doors, and on a worker CLIENT doors too: there, nobody but the fleet's routers has business unless
clients' keys are set.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto

from radixfleet.errors import PermissionDenied, RadixfleetError, Unauthenticated
from radixfleet.keys import ADMIN, KeyRing, key_hash
from radixfleet.limits import ClientLimits


class Door(Enum):
    """What a call or an HTTP request needs to be admitted: see the table above."""

    OPEN = auto()
    CLIENT = auto()
    ADMIN = auto()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who passed a door."""

    name: str = ""
    """The name of the key; "" without one."""
    is_admin: bool = False


_NOBODY = Caller()
_caller: ContextVar[Caller] = ContextVar("radixfleet_caller", default=_NOBODY)


def current_caller() -> Caller:
    """Who made the call that is being served. See `caller_name`."""
    return _caller.get()


def caller_name() -> str:
    """The name of the key by which the call that is being served came in; "" without one. Never the key itself.

    Tasks that a call starts inherit it, also those that outlive the call: ask within the call.
    """
    return _caller.get().name


def client_salt(salt: str) -> str:
    """A cache salt made of `salt` and the caller's key, so that other keys share no cached prefixes with this one.

    Calls with the admin token come from the fleet's own routers, which have salted the request already.
    """
    caller = _caller.get()
    return salt if caller.is_admin or not caller.name else f"{caller.name}\n{salt}"


def remember(caller: Caller) -> None:
    """Make `caller` the one of the running call, for `caller_name`."""
    _caller.set(caller)


def key_of(header: str | None) -> str | None:
    """The key of an authorization header, `Bearer KEY` or, as browsers send it, `Basic` with the key as password."""
    scheme, _, value = (header or "").strip().partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value or None
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(value, validate=True).decode()
    except ValueError:
        return None
    return decoded.partition(":")[2] or None


class Guard:
    """Decides who passes which door. Without `keys` and `tokens`, everybody passes every door."""

    def __init__(
        self,
        keys: Callable[[], KeyRing] | None = None,
        tokens: Callable[[], Sequence[str]] | None = None,
        *,
        token_closes_client_doors: bool = False,
        limits: ClientLimits | None = None,
        on_refusal: Callable[[RadixfleetError], None] | None = None,
    ) -> None:
        """`keys` and `tokens` are asked at each call, so that they may change.

        `on_refusal` hears of everybody who is turned away; it may be called from any thread.
        """
        self._keys = keys
        self._tokens = tokens
        self._token_closes_client_doors = token_closes_client_doors
        self._limits = limits
        self._on_refusal = on_refusal

    @property
    def is_open(self) -> bool:
        """Whether nobody needs a key for anything."""
        return self._keys is None and self._tokens is None

    @property
    def has_limits(self) -> bool:
        """Whether requests are counted."""
        return self._limits is not None

    def admit(self, door: Door, key: str | None) -> Caller:
        """The caller whose key is `key`. Raises Unauthenticated or PermissionDenied when it may not pass the door."""
        with self._refusals_told():
            return self._admit(door, key)

    def _admit(self, door: Door, key: str | None) -> Caller:
        caller = self._identify(key)
        if door is Door.OPEN or self._is_unlocked(door):
            return caller or _NOBODY
        if caller is None:
            if key is None:
                raise Unauthenticated("a key is needed here: send it as `authorization: Bearer KEY`")
            raise Unauthenticated("the key is not known here")
        if door is Door.ADMIN and not caller.is_admin:
            raise PermissionDenied("this needs the admin token, and not a client's key")
        return caller

    @contextmanager
    def visit(self, caller: Caller, host: str) -> Iterator[None]:
        """One request that costs work, counted against the client's limits. Raises Overloaded.

        A client is its key, or the host it calls from; the fleet itself, which has the admin token, has no limits.
        """
        if self._limits is None or caller.is_admin:
            yield
            return
        with ExitStack() as stack:
            with self._refusals_told():
                stack.enter_context(self._limits.visit(_client(caller, host)))
            yield

    @contextmanager
    def visit_more(self, caller: Caller, host: str, count: int) -> Iterator[None]:
        """So many more requests than the one of a visit that is under way. Raises Overloaded or InvalidRequest."""
        if self._limits is None or caller.is_admin:
            yield
            return
        with ExitStack() as stack:
            with self._refusals_told():
                stack.enter_context(self._limits.visit_more(_client(caller, host), count))
            yield

    @contextmanager
    def _refusals_told(self) -> Iterator[None]:
        try:
            yield
        except RadixfleetError as error:
            if self._on_refusal is not None:
                self._on_refusal(error)
            raise

    def _identify(self, key: str | None) -> Caller | None:
        if key is None or self.is_open:
            return None
        if self._tokens is not None:
            shown = key.encode("utf-8", "surrogatepass")
            # In constant time: a token is no hash, and must not be found letter by letter.
            if any(hmac.compare_digest(shown, token.encode()) for token in self._tokens()):
                return Caller(ADMIN, is_admin=True)
        name = self._keys().get(key_hash(key)) if self._keys is not None else None
        return None if name is None else Caller(name)

    def _is_unlocked(self, door: Door) -> bool:
        if self.is_open:
            return True
        return door is Door.CLIENT and self._keys is None and not self._token_closes_client_doors


def _client(caller: Caller, host: str) -> str:
    return f"key {caller.name}" if caller.name else f"host {host}"
