"""From a prepared request to its end: choose a worker, book, forward, account."""
