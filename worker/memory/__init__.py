"""Memory of a worker: page accounting, the prefix cache and the plan of the three pools (no torch), and the KV tensors."""
