"""Workloads, load generation and reports."""
