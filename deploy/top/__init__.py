"""`radixfleet top`: a live view of a fleet in the terminal."""
