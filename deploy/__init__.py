"""Composition of router and workers into a fleet, and the radixfleet command."""
