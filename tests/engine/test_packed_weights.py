"""The file with packed weights: written once, mapped afterwards, replaced if it does not fit."""

import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rank_models import save_rank_model
from run_engine import engine, generate
from tiny_models import config_of, random_model

from slipstream.engine.cpu import packed_file
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import start_real_engine
from slipstream.weights import load
from slipstream.weights.build import build_engine

PROMPTS = [[5, 6, 7], [1, 2] * 10]
NAME = "rank0.packed-bfloat16"
START = """
import json, sys
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import start_real_engine
loop = start_real_engine(sys.argv[1], EngineSettings(device="cpu", dtype="bfloat16", cache_tokens=512))
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(params=["bfloat16", "int4", "int8"])
def folder(request, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_PACKED_FROM_BYTES", 0)
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    random_model(config_of("llama", **sizes)).save_pretrained(tmp_path / "hf")
    weight_only = None if request.param == "bfloat16" else request.param
    return build_engine(tmp_path / "hf", tmp_path / "engine", weight_only=weight_only)


def packed_parts(loop):
    model = loop.runner.model
    found = [model.head.parts]
    for layer in model.layers:
        found += [layer.qkv.parts, layer.dense.parts, layer.up.parts, layer.down.parts]
    return [part for parts in found for part in parts]


def start(folder):
    return engine(folder, dtype="bfloat16", threads=1)


def test_later_starts_map_what_the_first_one_packed(folder):
    first = start(folder)
    file = folder / NAME
    written = file.read_bytes()
    stamp = file.stat().st_mtime_ns
    second = start(folder)
    assert (file.stat().st_mtime_ns, file.read_bytes()) == (stamp, written)
    pairs = list(zip(packed_parts(first), packed_parts(second), strict=True))
    assert pairs
    for one, other in pairs:
        assert (one.format, one.outputs, one.inputs) == (other.format, other.outputs, other.inputs)
        assert np.array_equal(one.data, other.data)
        assert not other.data.flags.writeable  # it is the file
        assert other.address % 64 == 0
    assert generate(second, PROMPTS, max_tokens=12) == generate(first, PROMPTS, max_tokens=12)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "no description", "outside"])
def test_a_damaged_file_is_replaced(folder, damage, caplog):
    expected = generate(start(folder), PROMPTS, max_tokens=12)
    file = folder / NAME
    whole = file.read_bytes()
    data = bytearray(whole)
    if damage == "flipped":
        data[100] ^= 1
    elif damage == "cut":
        del data[-20:]
    elif damage == "empty":
        data.clear()
    elif damage == "no description":
        data[-20:-16] = b"!!!!"
    else:
        start_of_text = data.rindex(b'{"key"')
        described = json.loads(data[start_of_text:-16])
        described["matrices"]["transformer.layers.0.mlp.proj"][0][2] = 1 << 40  # its bytes
        text = json.dumps(described).encode()
        data[start_of_text:] = text + struct.pack("<q8s", len(text), b"PACKED01")
    file.write_bytes(data)
    caplog.set_level(logging.WARNING)
    assert generate(start(folder), PROMPTS, max_tokens=12) == expected
    assert "the weights are packed again" in caplog.text
    assert file.read_bytes() == whole


def test_other_weights_are_packed_again(folder):
    start(folder)
    old = (folder / NAME).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=3))
    start(folder)
    assert (folder / NAME).read_bytes() != old


@pytest.mark.parametrize("failure", ["no such files", "full disk", "no room"])
def test_an_engine_starts_where_nothing_can_be_written(folder, failure, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if failure == "no such files":
        real = os.open

        def refuse(path, flags, *rest, **more):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "Operation not supported")
            return real(path, flags, *rest, **more)

        monkeypatch.setattr(packed_file.os, "open", refuse)
    elif failure == "full disk":
        monkeypatch.setattr(packed_file.os, "pwrite", fail)
    else:
        monkeypatch.setattr(packed_file, "_SPARE_DISK", 1 << 62)
    before = {path.name for path in folder.iterdir()}
    found = generate(start(folder), PROMPTS, max_tokens=12)
    assert {path.name for path in folder.iterdir()} == before
    monkeypatch.undo()
    assert found == generate(start(folder), PROMPTS, max_tokens=12)


def refuse_files_in(folder, monkeypatch):
    """Let the folder refuse new files, as a read-only one does. Root may write in every folder."""
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE and Path(path) == folder:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(packed_file.os, "open", refuse)


def test_packed_weights_of_a_read_only_folder_are_kept_in_the_cache(folder, home, monkeypatch):
    before = {path.name for path in folder.iterdir()}
    refuse_files_in(folder, monkeypatch)
    expected = generate(start(folder), PROMPTS, max_tokens=12)
    assert {path.name for path in folder.iterdir()} == before
    [file] = (home / "packed").glob(f"*/{NAME}")
    stamp = file.stat().st_mtime_ns
    again = start(folder)
    assert file.stat().st_mtime_ns == stamp
    assert not any(part.data.flags.writeable for part in packed_parts(again))
    assert generate(again, PROMPTS, max_tokens=12) == expected
    # a file in the engine's own folder comes first
    monkeypatch.undo()
    monkeypatch.setattr(load, "_PACKED_FROM_BYTES", 0)
    (folder / NAME).write_bytes(file.read_bytes())
    file.unlink()
    monkeypatch.setenv("SLIPSTREAM_HOME", str(home))
    assert generate(start(folder), PROMPTS, max_tokens=12) == expected
    assert not file.exists()


def test_ranks_keep_their_own_packed_weights(tmp_path, monkeypatch):
    """Each rank is a process of its own. Later starts map the files of the same number of ranks."""
    save_rank_model("llama", tmp_path / "hf", hidden_size=512, intermediate_size=4096)
    folder = build_engine(tmp_path / "hf", tmp_path / "engine")
    assert (folder / "rank0.engine").stat().st_size > load._PACKED_FROM_BYTES

    def answer(ranks: int) -> list[list[int]]:
        settings = EngineSettings(
            device="cpu", dtype="bfloat16", cache_tokens=512, threads=1, ranks=ranks
        )
        loop = start_real_engine(str(folder), settings)
        found = generate(loop, PROMPTS, max_tokens=8)
        loop.close()
        return found

    expected = answer(2)
    names = {f"rank{rank}of2.packed-bfloat16" for rank in (0, 1)}
    stamps = {name: (folder / name).stat().st_mtime_ns for name in names}
    assert answer(2) == expected
    assert {name: (folder / name).stat().st_mtime_ns for name in names} == stamps
    answer(1)
    assert (folder / NAME).exists()


def test_an_engine_of_compiled_code_needs_no_torch(tmp_path):
    """Torch would take a second of each start, and 200 MB."""
    random_model(config_of("llama")).save_pretrained(tmp_path / "hf")
    built = build_engine(tmp_path / "hf", tmp_path / "engine")
    code = START.replace("import json, sys", f"import json, sys; sys.path[:0] = {sys.path!r}")
    done = subprocess.run([sys.executable, "-c", code, str(built)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert "numpy" in loaded
    assert {"torch", "transformers", "llvmlite"} & set(loaded) == set()
