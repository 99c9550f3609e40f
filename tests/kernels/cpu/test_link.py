"""Loading relocatable objects into this process."""

import ctypes
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_steps import best_level

from slipstream.kernels.cpu.compiler.build import compile_object
from slipstream.kernels.cpu.compiler.instruction_levels import BY_NAME
from slipstream.kernels.cpu.link import Image

TABLE = """
@table = internal constant [4 x i32] [i32 7, i32 11, i32 13, i32 17], align 16
@entry = internal constant ptr getelementptr ([4 x i32], ptr @table, i64 0, i64 2)
declare i32 @getpid()
define i32 @of_table(i64 %index) {
  %place = getelementptr [4 x i32], ptr @table, i64 0, i64 %index
  %value = load i32, ptr %place
  ret i32 %value
}
define i32 @through_pointer() {
  %place = load volatile ptr, ptr @entry
  %value = load i32, ptr %place
  ret i32 %value
}
define i32 @outside() {
  %result = call i32 @getpid()
  %negative = sub i32 0, %result
  ret i32 %negative
}
define i32 @scaled(float %value) {
  %product = fmul float %value, 3.7500000e+00
  %result = fptosi float %product to i32
  ret i32 %result
}
"""


def function(image, name, *arguments):
    return ctypes.CFUNCTYPE(ctypes.c_int32, *arguments)(image.address(name))


def test_constants_pointers_and_functions_outside_are_reached():
    image = Image(compile_object(TABLE, best_level()))
    assert [function(image, "of_table", ctypes.c_int64)(i) for i in range(4)] == [7, 11, 13, 17]
    assert function(image, "through_pointer")() == 13
    assert function(image, "outside")() == -os.getpid()
    assert function(image, "scaled", ctypes.c_float)(8.0) == 30


def test_nothing_of_an_image_can_be_written():
    image = Image(compile_object(TABLE, best_level()))
    code = image.address("of_table")
    modes, code_end = [], 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= code < end or start == code_end:
            modes.append(line.split()[1])
        code_end = end if start <= code < end else 0
    assert modes == ["r-xp", "r--p"]


def test_a_name_that_is_not_exported_is_refused():
    image = Image(compile_object(TABLE, best_level()))
    with pytest.raises(ValueError, match="no function absent"):
        image.address("absent")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(200)])
def test_what_is_not_an_object_is_refused(data):
    with pytest.raises(ValueError, match="not a relocatable object"):
        Image(data)


def test_instructions_of_aarch64_reach_their_targets():
    """On any machine: read back the operands of the instructions."""
    image = Image(compile_object(TABLE, BY_NAME["neon"]))
    start = image.address("of_table")
    code = struct.unpack("<64I", ctypes.string_at(start, 256))
    page = next(i for i, word in enumerate(code) if word & 0x9F000000 == 0x90000000)
    add = next(word for word in code[page:] if word & 0xFFC00000 == 0x91000000)
    pages = (code[page] >> 5 & 0x7FFFF) << 2 | code[page] >> 29 & 3
    pages -= (pages & 1 << 20) << 1
    target = (((start + 4 * page) >> 12) + pages << 12) + (add >> 10 & 0xFFF)
    assert struct.unpack("<4i", ctypes.string_at(target, 16)) == (7, 11, 13, 17)
    assert jump_targets(image.address("outside")) == [
        ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    ]


def jump_targets(start):
    """Return where the calls of a function lead, through the jumps of the image."""
    targets = []
    for place in range(start, start + 40, 4):
        [word] = struct.unpack("<I", ctypes.string_at(place, 4))
        if word >> 26 == 0b100101:
            offset = (word & 0x3FFFFFF) - ((word & 1 << 25) << 1)
            load, jump, address = struct.unpack("<IIQ", ctypes.string_at(place + 4 * offset, 16))
            assert (load, jump) == (0x58000050, 0xD61F0200)
            targets.append(address)
    return targets


FRAGMENTED = """import ctypes
import sys

sys.path[:0] = {paths!r}
from cpu_steps import best_level, new_team
from slipstream.kernels.cpu import objects
from slipstream.kernels.cpu.code.step import write_module
from slipstream.kernels.cpu.compiler.build import compile_object
from test_code_objects import works

level = best_level()
code = compile_object(write_module(level), level)
objects._compile = lambda level: code

# Reserve the free places between the libraries, then 8 GiB below them; free small gaps above.
NO_ACCESS, PRIVATE = 0, 0x4022
library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
ends = [0, 0]
reserved = []
for line in open("/proc/self/maps"):
    start, end = (int(x, 16) for x in line.split()[0].split("-"))
    if ends[1] > 0x7000_0000_0000 and 0 < start - ends[1] < 1 << 36:
        place = library.mmap(ends[1], start - ends[1], NO_ACCESS, PRIVATE, -1, 0)
        reserved.append((place, start - ends[1]))
    ends = [start, end]
library.mmap(None, 8 << 30, NO_ACCESS, PRIVATE, -1, 0)
for place, size in reserved:
    if size >= 48 << 10:
        library.munmap(place, 32 << 10)
team = new_team(3)
print(works(team))
team.close()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="places of mappings on x86-64")
def test_code_loads_into_a_fragmented_address_space():
    script = FRAGMENTED.format(paths=sys.path)
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (found.stdout, found.returncode) == ("True\n", 0), found.stderr
