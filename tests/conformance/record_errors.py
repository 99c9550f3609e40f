"""Record what the real server answers to the generated wrong requests.

    TRITONSERVER=/path/to/tritonserver python tests/conformance/record_errors.py

Needs a Triton; see `test_live_triton.py`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from bad_requests.grpc_answers import GrpcSender
from bad_requests.grpc_cases import grpc_cases
from bad_requests.http_answers import HttpSender
from bad_requests.http_cases import http_cases
from bad_requests.recordings import write_recording
from bad_requests.servers import RealAnswers
from real_triton import find_tritonserver


def main() -> None:
    binary = find_tritonserver()
    assert binary is not None, "pip install nvidia-pytriton, or set TRITONSERVER"
    with tempfile.TemporaryDirectory() as folder:
        real = RealAnswers(binary, Path(folder))
        http = http_cases()
        answers = real.send_all(http, lambda server: HttpSender(server.http_port))
        write_recording("errors_http", http, answers)
        grpc = grpc_cases()
        answers = real.send_all(grpc, lambda server: GrpcSender(server.grpc_port))
        write_recording("errors_grpc", grpc, answers)


if __name__ == "__main__":
    main()
