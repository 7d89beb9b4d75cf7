"""The contract between router, worker and clients: messages, types, and what both sides must compute alike."""

import os

# Else gRPC's core writes a line to stderr whenever a peer closes a connection. It reads this when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
