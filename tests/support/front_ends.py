"""The processes of a server with several front ends, connections to each of them, and requests.

The kernel chooses the process that gets a connection. `connect_to_each` connects until every
process has one, and finds the owner of each in /proc.
"""

from __future__ import annotations

import json
import os
import queue
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import tritonclient.grpc as grpcclient
from tiny_server import MODEL, children_of, command_of, make_repository
from tritonclient.utils import np_to_triton_dtype

_MODULE = "slipstream.server.frontends.process"
_ESTABLISHED = "01"
_TRIES = 400
# by default httpx closes a connection after five idle seconds, and the next may reach another process
KEPT = httpx.Limits(keepalive_expiry=None)

FRONT_ENDS = 3
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
UPPER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("upper", text)]) for text in texts]
"""
UPPER_CONFIG = """backend: "python" response_cache { enable: true }
input [ { name: "text" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "upper" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
FLAGS = (
    f"--frontends={FRONT_ENDS}",
    "--model-control-mode=explicit",
    "--load-model=*",
    "--allow-python-models=true",
    "--cache-config=local,size=1048576",
    "--http-metrics=true",
)
GENERATE = f"/v2/models/{MODEL}/generate"


def secondaries(primary: int) -> list[int]:
    """Return the process ids of the secondary front ends, oldest first."""
    return [found for found in children_of(primary) if _MODULE in command_of(found)]


def front_ends(primary: int) -> list[int]:
    """Return the process ids of all front ends, the primary one first."""
    return [primary, *secondaries(primary)]


def http_clients(primary: int, port: int) -> dict[int, httpx.Client]:
    """Return a client for each front end, by process id, each with a connection that is kept."""

    def connect() -> tuple[httpx.Client, int]:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=KEPT)
        stream = client.get("/v2/health/live").extensions["network_stream"]
        return client, stream.get_extra_info("client_addr")[1]

    return _connect_to_each(front_ends(primary), port, connect)


def grpc_clients(primary: int, port: int) -> dict[int, grpcclient.InferenceServerClient]:
    """Return a client for each front end, by process id."""

    def connect() -> tuple[grpcclient.InferenceServerClient, int]:
        before = _own_ports(port)
        # one connection per client, not one that all clients share
        own = [("grpc.use_local_subchannel_pool", 1)]
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}", channel_args=own)
        assert client.is_server_live()
        (new,) = _own_ports(port) - before
        return client, new

    return _connect_to_each(front_ends(primary), port, connect)


def _connect_to_each(processes: list[int], port: int, connect: Callable) -> dict:
    found: dict = {}
    for _ in range(_TRIES):
        client, client_port = connect()
        owner = _owner(processes, port, client_port)
        if owner in found:
            client.close()
        else:
            found[owner] = client
        if len(found) == len(processes):
            return {process: found[process] for process in processes}
    raise AssertionError(f"only {len(found)} of {len(processes)} front ends got a connection")


def _owner(processes: list[int], port: int, client_port: int) -> int:
    """Return the process that has the server's end of a connection."""
    # a set: the kernel may list a connection twice if others open meanwhile
    inodes = {
        inode for local, remote, inode in _connections() if (local, remote) == (port, client_port)
    }
    (owner,) = (process for process in processes if inodes & _inodes(process))
    return owner


def _own_ports(server_port: int) -> set[int]:
    """Return the ports of this process's connections to a server."""
    own = _inodes(os.getpid())
    return {
        local for local, remote, inode in _connections() if remote == server_port and inode in own
    }


def _connections() -> list[tuple[int, int, str]]:
    """Return local port, remote port and inode of all connections."""
    rows = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _ESTABLISHED:
                ports = [int(place.rpartition(":")[2], 16) for place in words[1:3]]
                rows.append((ports[0], ports[1], words[9]))
    return rows


def _inodes(process: int) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            found.add(match.group(1))
    return found


def write_models(folder):
    """Write the counting model with a chat template and a queue of two, and a Python model."""
    repository = make_repository(folder)
    template = {"chat_template": TEMPLATE}
    (folder / "engines" / "fine" / "tokenizer_config.json").write_text(json.dumps(template))
    config = repository / "tensorrt_llm" / "config.pbtxt"
    rules = "dynamic_batching { default_queue_policy { max_queue_size: 2 }"
    config.write_text(config.read_text().replace("dynamic_batching {", rules))
    (repository / "upper" / "1").mkdir(parents=True)
    (repository / "upper" / "1" / "model.py").write_text(UPPER)
    (repository / "upper" / "config.pbtxt").write_text(UPPER_CONFIG)
    return repository


def body(prompt: str = "5", max_tokens: int = 3, milliseconds: int = 0) -> dict:
    return {"text_input": prompt, "max_tokens": max_tokens, "random_seed": milliseconds}


def grpc_input(name: str, array: np.ndarray) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def token_inputs(prompt: list[int], max_tokens: int, milliseconds: int = 0, **more):
    values = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": np.array([[len(prompt)]], np.int32),
        "request_output_len": np.array([[max_tokens]], np.int32),
        "random_seed": np.array([[milliseconds]], np.uint64),
        **more,
    }
    return [grpc_input(name, array) for name, array in values.items()]


@contextmanager
def open_stream(client) -> Iterator[queue.Queue]:
    """Open a stream over gRPC; return a queue with its results and errors."""
    results: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    try:
        yield results
    finally:
        client.stop_stream(cancel_requests=True)
