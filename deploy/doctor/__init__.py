"""`radixfleet doctor`: what this machine gives a worker, and what a model would take of a device that is not here."""
