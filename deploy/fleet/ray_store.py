"""The fleet's books in Ray's key-value store."""

from __future__ import annotations

from ray.experimental import internal_kv

from deploy.fleet.spec import NAMESPACE

_KEY = b"books"


class RayStore:
    """The books in the key-value store of Ray's GCS: they outlive every actor, and the head where the GCS is kept."""

    def load(self) -> bytes | None:
        """Blocks."""
        data: bytes | None = internal_kv._internal_kv_get(_KEY, namespace=NAMESPACE.encode())
        return data

    def save(self, data: bytes) -> None:
        """Blocks."""
        internal_kv._internal_kv_put(_KEY, data, namespace=NAMESPACE.encode())

    def clear(self) -> None:
        """Nothing was ever saved. Blocks."""
        internal_kv._internal_kv_del(_KEY, namespace=NAMESPACE.encode())
