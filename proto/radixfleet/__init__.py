"""The contract between router, worker and clients: messages, types, and what both sides must compute alike."""
