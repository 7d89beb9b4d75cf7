"""Attention over the paged KV pool: one protocol, several backends, one conformance suite (tests/conformance)."""
