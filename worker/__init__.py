"""The worker process: one model on one device behind gRPC."""
