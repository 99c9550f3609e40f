"""The server as a deployment of Ray Serve: `serve run slipstream.ray.serve:app repository=...`."""
