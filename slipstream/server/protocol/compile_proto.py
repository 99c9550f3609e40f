"""Write `descriptor.py` from `grpc_service.proto`. A tool for developers; it needs grpcio-tools."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LINE_BYTES = 48


def compile_proto() -> str:
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "set"
        arguments = [f"--proto_path={HERE}", f"--descriptor_set_out={found}", "grpc_service.proto"]
        if protoc.main(["protoc", *arguments]) != 0:
            raise SystemExit("protoc refused grpc_service.proto")
        return render(found.read_bytes())


def render(serialised: bytes) -> str:
    lines = [serialised[start : start + LINE_BYTES].hex() for start in range(0, len(serialised), LINE_BYTES)]
    body = "\n".join(f'    "{line}"' for line in lines)
    return (
        '"""Written by compile_proto.py from grpc_service.proto; do not edit. A FileDescriptorSet."""\n\n'
        f"FILE_DESCRIPTOR_SET = bytes.fromhex(\n{body}\n)\n"
    )


if __name__ == "__main__":
    (HERE / "descriptor.py").write_text(compile_proto())
    sys.exit(0)
