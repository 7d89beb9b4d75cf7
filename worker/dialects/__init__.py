"""What other projects' gateways ask of a worker, answered beside our own services when their definitions are installed.

The definitions are the package smg-grpc-proto (`pip install radixfleet[engines]`). Each dialect is one gRPC service; a
gateway finds out which one a worker speaks by asking for the health of each.
"""
