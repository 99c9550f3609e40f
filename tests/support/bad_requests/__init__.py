"""Generated wrong requests, the same in each run, for HTTP and gRPC."""
