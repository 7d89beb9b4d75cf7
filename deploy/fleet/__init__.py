"""Fleets from a file: what is wanted (`spec`), what to do about it (`reconcile`, `scaling`), and Ray, which does it."""
