"""Write a folder like the checkout that tutorials clone, with the templates of one release.

Its scripts call the commands of this package, so commands such as
`python3 tools/fill_template.py …` work as pasted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slipstream.repository.releases.render import render_template
from slipstream.repository.releases.tables import REPOSITORIES, list_models
from slipstream.weights.whole_file import write_whole

_SCRIPT = '''#!/usr/bin/env python3
"""The same as `slipstream {command}`."""

import sys

try:
    from slipstream.cli.compat.scripts import script
except ModuleNotFoundError as error:
    if error.name != "slipstream":
        raise
    sys.exit(
        f"error: slipstream is not installed for {{sys.executable}}; activate the virtual "
        "environment that has it, or call this script with its Python"
    )

script("{command}")
'''

_EXAMPLES = {
    "examples/run.py": "classic-run",
    "examples/hf_lora_convert.py": "lora",
    "examples/gpt/hf_gpt_convert.py": "gpt-convert",
    "examples/quantization/quantize.py": "quantize",
    **{
        f"examples/{family}/{name}": command
        for family in (
            "llama",
            "gpt",
            "qwen",
            "mistral",
            "mixtral",
            "falcon",
            "gemma",
            "gptj",
            "gptneox",
            "opt",
            "phi",
        )
        for name, command in (
            ("convert_checkpoint.py", "convert"),
            ("build.py", "build"),
            ("run.py", "classic-run"),
            ("hf_lora_convert.py", "lora"),
        )
    },
}

# Path in the workspace → the command that the script calls.
SCRIPTS = {
    "tools/fill_template.py": "fill",
    "scripts/launch_triton_server.py": "launch",
    "inflight_batcher_llm/client/inflight_batcher_llm_client.py": "client",
    "inflight_batcher_llm/client/end_to_end_grpc_client.py": "end-to-end-client",
    "inflight_batcher_llm/client/e2e_grpc_speculative_decoding_client.py": "speculative-client",
    "tools/inflight_batcher_llm/end_to_end_streaming_client.py": "end-to-end-client",
    "tools/inflight_batcher_llm/end_to_end_test.py": "end-to-end-test",
    "tools/inflight_batcher_llm/benchmark_core_model.py": "benchmark-core-model",
    "tools/inflight_batcher_llm/identity_test.py": "identity-test",
    "tools/gpt/client.py": "gpt-client",
    "tools/gpt/client_async.py": "gpt-client",
    "tools/gpt/identity_test.py": "gpt-identity-test",
    "tools/gpt/benchmark_core_model.py": "gpt-identity-test",
    "tools/gpt/gen_input_data.py": "gpt-input-data",
    "tools/gpt/end_to_end_test.py": "gpt-end-to-end-test",
    **_EXAMPLES,
    **{f"tensorrt_llm/{path}": command for path, command in _EXAMPLES.items()},
}


class WorkspaceResult(NamedTuple):
    new: int
    kept: tuple[Path, ...]  # existing files with other content, not overwritten


def write_workspace(folder: Path, release: str) -> WorkspaceResult:
    """Write the files that are missing. Existing files are not changed."""
    new = 0
    kept = []
    for name, content in workspace_files(release):
        path = folder / name
        if not path.exists():
            write_whole(path, content, 0o755 if name.endswith(".py") else 0o644)
            new += 1
        elif path.read_text(encoding="utf-8") != content:
            kept.append(path)
    return WorkspaceResult(new, tuple(kept))


def workspace_files(release: str) -> Iterator[tuple[str, str]]:
    for repository in REPOSITORIES:
        for model in list_models(repository, release):
            yield f"all_models/{repository}/{model}/1/.gitkeep", ""
            yield (
                f"all_models/{repository}/{model}/config.pbtxt",
                render_template(repository, model, release),
            )
    for name, command in SCRIPTS.items():
        yield name, _SCRIPT.format(command=command)
