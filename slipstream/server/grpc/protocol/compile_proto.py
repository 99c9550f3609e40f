"""Write `descriptor.py` from the `.proto` files. A tool for developers; it needs grpcio-tools."""

from __future__ import annotations

import base64
import sys
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).parent
FILES = ("model_config.proto", "grpc_service.proto")  # each after what it imports
LINE_CHARACTERS = 100


def compile_proto() -> str:
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "set"
        arguments = [f"--proto_path={HERE}", f"--descriptor_set_out={found}", *FILES]
        if protoc.main(["protoc", *arguments]) != 0:
            raise SystemExit("protoc refused them")
        return render(found.read_bytes())


def render(serialised: bytes) -> str:
    packed = base64.b85encode(zlib.compress(serialised, 9)).decode()
    lines = [
        packed[start : start + LINE_CHARACTERS] for start in range(0, len(packed), LINE_CHARACTERS)
    ]
    body = "\n".join(f'    "{line}"' for line in lines)
    return (
        '"""Written by compile_proto.py from the .proto files; do not edit. A FileDescriptorSet, compressed."""\n\n'
        "import base64\nimport zlib\n\n"
        f"FILE_DESCRIPTOR_SET = zlib.decompress(base64.b85decode(\n{body}\n))  # fmt: skip\n"
    )


if __name__ == "__main__":
    (HERE / "descriptor.py").write_text(compile_proto())
    sys.exit(0)
