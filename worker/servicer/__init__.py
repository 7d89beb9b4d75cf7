"""The worker's gRPC face: its services, and the state that they tell. Everything runs on the front's event loop."""
