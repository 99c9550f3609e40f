"""The LoRA adapter of a request: sent as tensors, or selected by a task id or a name.

Named adapters are folders: those below one configured folder, and those added at run time.

An adapter's number is a hash of its content, so that the engine recognises an adapter that is sent
twice, whatever its name. A task id means the adapter that was last sent with it, while the engine
has that adapter.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.server.engine_link.engine import AdapterUse
from slipstream.server.fields.values import RequestFields
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.tensor_bytes import pack

FIELDS = ("lora_name", "lora_task_id", "lora_weights", "lora_config")
_DATATYPES: Mapping[str, Literal["float16", "float32", "bfloat16"]] = {
    "FP16": "float16",
    "FP32": "float32",
    "BF16": "bfloat16",
}
_MAX_TASKS = 100_000
_WEIGHT_FILES = ("adapter_model.safetensors", "model.lora_weights.npy", "adapter_config.json")


class AdapterRegistry:
    """The adapters that requests to one engine can select."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` has a subfolder for each adapter that requests can name."""
        self._folder = folder
        self._added: dict[str, Path] = {}  # name → folder of the adapters added at run time
        self._tasks: OrderedDict[int, int] = OrderedDict()  # task id → number of the adapter

    async def select(self, fields: RequestFields) -> AdapterUse | None:
        """Return the adapter of a request, None if it has none."""
        given = [field for field in FIELDS if fields.given(field) is not None]
        if not given:
            return None
        if "lora_name" in given:
            return self._by_name(fields, given)
        task = fields.integer("lora_task_id")
        if "lora_weights" in given or "lora_config" in given:
            return await self._by_tensors(fields, given, task)
        return self._by_task(task) if task else None

    def from_folder(self, folder: Path, name: str) -> AdapterUse:
        """Return the adapter in a folder. If its files change, it gets another number."""
        if not folder.is_dir():
            raise InferenceError(f"{name}: there is no folder {folder}", Code.NOT_FOUND)
        stamps = [_stamp(folder / file) for file in _WEIGHT_FILES if (folder / file).is_file()]
        number = _number(str(folder.resolve()).encode(), *(stamp.encode() for stamp in stamps))
        return AdapterUse(number, name, AdapterSource(folder=str(folder.resolve())))

    def _by_name(self, fields: RequestFields, given: list[str]) -> AdapterUse | None:
        name = fields.text("lora_name")
        if not name:
            return None
        if len(given) > 1:
            raise InferenceError(f"lora_name does not go with {given[1]}: each names an adapter")
        return self.find(name)

    def find(self, name: str) -> AdapterUse:
        """Return the adapter of this name."""
        folder = self._find_folder(name)
        if folder is None:
            where = (
                ": no folder of adapters is configured (lora_prefetch_dir)"
                if self._folder is None
                else ""
            )
            raise InferenceError(f"adapter '{name[:200]}' not found{where}", Code.NOT_FOUND)
        return self.from_folder(folder, f"adapter '{name}'")

    def names(self) -> list[str]:
        """Return the names of the adapters that requests can name now."""
        found = {name for name, folder in self._added.items() if holds_adapter(folder)}
        if self._folder is not None and self._folder.is_dir():
            found.update(path.name for path in self._folder.iterdir() if holds_adapter(path))
        return sorted(found)

    def was_added(self, name: str) -> bool:
        """Return whether the adapter of this name was added at run time."""
        return name in self._added

    def add(self, name: str, folder: Path) -> None:
        """Register the adapter in this folder, in place of one that was added before."""
        self._added[name] = folder

    def remove(self, name: str) -> None:
        """Undo `add`. Requests that run with the adapter keep its number and finish with it."""
        self._added.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether requests can name this adapter, without listing all of them."""
        folder = self._find_folder(name)
        return folder is not None and holds_adapter(folder)

    def _find_folder(self, name: str) -> Path | None:
        """Return the adapter folder of this name. A name is never a path."""
        if name in self._added:
            folder = self._added[name]
            return folder if folder.is_dir() else None
        if self._folder is None or name in ("", ".", "..") or "/" in name or "\0" in name:
            return None
        if len(name.encode(errors="replace")) > 255:  # the file system's limit
            return None
        folder = self._folder / name
        return folder if folder.is_dir() else None

    async def _by_tensors(self, fields: RequestFields, given: list[str], task: int) -> AdapterUse:
        for field in ("lora_weights", "lora_config"):
            if field not in given:
                raise InferenceError(
                    f"{field} is missing: lora_weights and lora_config must be sent together"
                )
        weights = fields["lora_weights"].tensor
        config = fields["lora_config"].tensor
        if weights.datatype not in _DATATYPES:
            raise InferenceError(f"lora_weights must be FP16, BF16 or FP32, got {weights.datatype}")
        if len(config.data) % 3:
            raise InferenceError(
                f"lora_config must hold three numbers a module, got {len(config.data)}"
            )
        numbers = config.values()
        modules = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        raw = pack(weights)
        # In a thread: the weights may have hundreds of megabytes.
        number = await asyncio.to_thread(_number, raw, weights.datatype.encode(), pack(config))
        source = AdapterSource(weights=raw, datatype=_DATATYPES[weights.datatype], modules=modules)
        if task:
            self._remember(task, number)
        name = f"LoRA task {task}" if task else "the adapter of the request"
        return AdapterUse(number, name, source)

    def _by_task(self, task: int) -> AdapterUse:
        name = f"LoRA task {task}"
        if task in self._tasks:
            self._tasks.move_to_end(task)
            return AdapterUse(self._tasks[task], name)
        folder = self._find_folder(str(task))
        if folder is not None:
            return self.from_folder(folder, name)
        raise InferenceError(f"{name} not found in cache. Please send LoRA weights with request")

    def _remember(self, task: int, number: int) -> None:
        self._tasks[task] = number
        self._tasks.move_to_end(task)
        while len(self._tasks) > _MAX_TASKS:
            self._tasks.popitem(last=False)


def holds_adapter(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _WEIGHT_FILES)


def _stamp(file: Path) -> str:
    """Return a text that changes whenever the file does, even if its old times are restored."""
    status = file.stat()
    return f"{file.name}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _number(*parts: bytes) -> int:
    """Return 63 bits of the hash of the parts. Never 0, which means no adapter."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + hashlib.sha256(part).digest())
    return int.from_bytes(digest.digest()[:8], "little") >> 1 or 1
