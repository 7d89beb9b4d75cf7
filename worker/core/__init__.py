"""Plain data that the worker's processes exchange: no torch, grpc or protobuf."""
