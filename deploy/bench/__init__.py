"""Benchmarks of this machine that the command runs: real engines, on real or simulated devices."""
