"""Runs the scheduler against a runner, and the handle by which the worker's front uses it."""
