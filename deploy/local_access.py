"""TLS and keys of a fleet on one machine: the same for the router and its workers, and an admin token if there is none.

Children find the token in a file that only their user can read, and not on their command line, which everybody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr

from deploy.processes import write_secret
from radixfleet.access import Access
from radixfleet.endpoint import Endpoint
from radixfleet.keys import new_key
from radixfleet.watched_file import UnusableFile
from router.config import RouterSettings
from worker.config import WorkerSettings

TOKEN_FILE = "admin-token"  # noqa: S105  a name
_PASSED_ON = (
    "tls_cert",
    "tls_key",
    "tls_ca",
    "tls_client_ca",
    "tls_peer_name",
    "api_keys",
    "admin_token",
    "isolate_clients",
)


@dataclass(frozen=True, slots=True)
class LocalAccess:
    """What `up` passes on."""

    options: Mapping[str, Any]
    """Of the router, by field name, with what its workers have to dial it; the token as @FILE."""
    endpoint: Callable[[str], Endpoint]
    """Makes of the router's address what is dialled."""
    token_file: Path | None
    """Where the admin token lies; None: there is none."""
    secrets: Mapping[Path, str] = field(repr=False)
    """Files that were written here: the token, where the operator has it in none."""

    def flags(self, address: str) -> str:
        """What commands that call the router need."""
        flags = f" --endpoint {address}"
        for name in ("tls_ca", "tls_peer_name"):
            if self.options[name] is not None:
                flags += f" --{name.replace('_', '-')} {self.options[name]}"
        if self.options["tls_client_ca"] is not None:
            flags += " --tls-cert YOURS --tls-key YOURS"
        return f"{flags} --api-key YOURS" if self.options["api_keys"] else flags

    @classmethod
    def from_settings(cls, settings: RouterSettings | WorkerSettings, run_dir: Path) -> Self:
        """Writes the admin token into `run_dir` where it is needed and in no file yet. Raises UnusableFile."""
        if (settings.tls_cert is None) != (settings.tls_ca is None):
            raise UnusableFile(
                "--tls-cert and --tls-ca go together here, because the router and its workers dial each other"
            )
        token = settings.admin_token.get_secret_value() if settings.admin_token else None
        if token is None and settings.api_keys:
            token = new_key()
        token_file: Path | None = None
        secrets: dict[Path, str] = {}
        if token is not None and token.startswith("@"):
            token_file = Path(token[1:])
        elif token is not None:
            token_file = run_dir / TOKEN_FILE
            secrets[token_file] = f"{token}\n"
            write_secret(token_file, secrets[token_file])
        if token_file is not None:
            settings = settings.model_copy(update={"admin_token": SecretStr(f"@{token_file}")})
        access = Access.from_settings(settings)
        options = {name: getattr(settings, name) for name in _PASSED_ON}
        options["admin_token"] = None if token_file is None else f"@{token_file}"
        return cls(options, access.endpoint, token_file, secrets)
