"""The engine behind Triton: requests and responses as messages of gRPC."""
