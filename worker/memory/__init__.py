"""Memory of a worker: page accounting, prefix cache and plan of the three pools (no torch), and the KV tensors."""
