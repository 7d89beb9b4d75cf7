"""The router's HTTP server: the OpenAI-compatible API and what operators ask, through the same dispatch as gRPC."""
