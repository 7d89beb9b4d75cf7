"""The contract between router, worker and clients: messages, shared types, and the few things both sides must compute alike."""
