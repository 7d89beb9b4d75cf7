"""Which request computes what in the next step: pure decisions over numpy and plain data, no torch, no I/O."""
