"""BentoML's own client: calls the service twice and prints both streams."""

import json
import sys

import bentoml


def main(url: str, prompt: str, tokens: str) -> list[list[str]]:
    with bentoml.SyncHTTPClient(url, server_ready_timeout=120, timeout=120) as client:
        return [list(client.generate(prompt=prompt, max_tokens=int(tokens))) for _ in range(2)]


print(json.dumps(main(*sys.argv[1:])))
