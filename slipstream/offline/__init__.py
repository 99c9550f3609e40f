"""`slipstream.LLM` in parts: parameters, results, streams, progress, and the server beside it."""
