"""Load a relocatable object into this process.

LLVM's own loader maps each section by itself. Where the kernel places two of them more than 2 GiB
apart, the 32-bit offsets between them do not fit, and LLVM ends the process. Here all sections lie
in one mapping. A start with cached code also saves the time and memory of loading LLVM.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_RELOCATABLE = 1
_X86_64 = 62
_AARCH64 = 183
# types of sections
_SYMBOLS = 2
_RELOCATIONS = 4
_ZEROS = 8
# flags of sections
_IN_MEMORY = 2
_EXECUTABLE = 4
_JUMP_BYTES = 16
_JUMPS = {  # to the address in the 8 bytes that follow
    _X86_64: bytes.fromhex("ff2502000000 0000"),  # jmp [rip + 2]
    _AARCH64: bytes.fromhex("50000058 00021fd6"),  # ldr x16, #8; br x16
}


@dataclass(frozen=True)
class Section:
    kind: int
    flags: int
    offset: int
    size: int
    symbols: int  # of relocations: the section of their symbols; of symbols: that of their names
    target: int  # of relocations: the section to change
    alignment: int


@dataclass(frozen=True)
class Symbol:
    name: str
    section: int  # 0: outside the object
    value: int


class Image:
    """The machine code of an object, in memory. It stays as long as this does."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._machine, self._sections = _read_sections(data)
        self._symbols = self._read_symbols()
        outside = [s.name for s in self._symbols if s.section == 0 and s.name]
        self._places, jumps, self._code_bytes, size = self._lay_out(len(outside))
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._jumps = {name: jumps + _JUMP_BYTES * i for i, name in enumerate(outside)}
        self._fill()
        for section in self._sections:
            if section.kind == _RELOCATIONS and section.target in self._places:
                self._relocate(section)
        self._protect()

    def address(self, name: str) -> int:
        """Return the address of a function that the object exports."""
        for symbol in self._symbols:
            if symbol.name == name and symbol.section in self._places:
                return self._base + self._places[symbol.section] + symbol.value
        raise ValueError(f"the object has no function {name}")

    def _read_symbols(self) -> list[Symbol]:
        [table] = [section for section in self._sections if section.kind == _SYMBOLS]
        names = self._content(self._sections[table.symbols])
        return [
            Symbol(names[name : names.index(b"\0", name)].decode(), section, value)
            for name, _, _, section, value, _ in _SYMBOL.iter_unpack(self._content(table))
        ]

    def _content(self, section: Section) -> bytes:
        return self._data[section.offset : section.offset + section.size]

    def _lay_out(self, jumps: int) -> tuple[dict[int, int], int, int, int]:
        """Return the offsets of the sections in memory, that of the jumps, and two sizes.

        The code and the jumps come first; what may not be executed begins on a page of its own.
        """
        places: dict[int, int] = {}
        end = self._append(places, 0, executable=True)
        first_jump = _round_up(end, _JUMP_BYTES)
        code_bytes = _round_up(first_jump + jumps * _JUMP_BYTES, mmap.PAGESIZE)
        end = self._append(places, code_bytes, executable=False)
        return places, first_jump, code_bytes, _round_up(end, mmap.PAGESIZE)

    def _append(self, places: dict[int, int], end: int, executable: bool) -> int:
        for index, section in enumerate(self._sections):
            if section.flags & _IN_MEMORY and bool(section.flags & _EXECUTABLE) == executable:
                places[index] = _round_up(end, section.alignment)
                end = places[index] + section.size
        return end

    def _fill(self) -> None:
        for index, place in self._places.items():
            section = self._sections[index]
            if section.kind != _ZEROS:
                self._memory[place : place + section.size] = self._content(section)
        library = ctypes.CDLL(None)
        for name, place in self._jumps.items():
            address = ctypes.cast(library[name], ctypes.c_void_p).value
            self._memory[place : place + _JUMP_BYTES] = _JUMPS[self._machine] + struct.pack(
                "<Q", address
            )

    def _relocate(self, section: Section) -> None:
        change = _change_x86_64 if self._machine == _X86_64 else _change_aarch64
        start = self._places[section.target]
        for offset, info, addend in _RELOCATION.iter_unpack(self._content(section)):
            symbol = self._symbols[info >> 32]
            if symbol.section == 0:
                target = self._jumps[symbol.name]
            else:
                target = self._places[symbol.section] + symbol.value
            change(self._memory, info & 0xFFFFFFFF, self._base, start + offset, target + addend)

    def _protect(self) -> None:
        _mprotect(self._base, self._code_bytes, mmap.PROT_READ | mmap.PROT_EXEC)
        rest = len(self._memory) - self._code_bytes
        if rest:
            _mprotect(self._base + self._code_bytes, rest, mmap.PROT_READ)


def _read_sections(data: bytes) -> tuple[int, list[Section]]:
    fields = _HEADER.unpack(data[: _HEADER.size].ljust(_HEADER.size, b"\0"))
    magic, kind, machine = fields[:3]
    if magic[:6] != _ELF64_LITTLE or kind != _RELOCATABLE or machine not in _JUMPS:
        raise ValueError("not a relocatable object of a machine that is known")
    start = fields[6]
    number = fields[12]
    return machine, [
        Section(kind, flags, offset, size, link, info, max(1, alignment))
        for _, kind, flags, _, offset, size, link, info, alignment, _ in _SECTION.iter_unpack(
            data[start : start + number * _SECTION.size]
        )
    ]


def _change_x86_64(memory: mmap.mmap, kind: int, base: int, place: int, target: int) -> None:
    if kind in (2, 4):  # PC32, PLT32
        struct.pack_into("<i", memory, place, target - place)
    elif kind == 1:  # 64
        struct.pack_into("<Q", memory, place, base + target)
    else:
        raise ValueError(f"relocation {kind} is not one that the linker knows")


def _change_aarch64(memory: mmap.mmap, kind: int, base: int, place: int, target: int) -> None:
    """Write an operand into an instruction.

    base: begins a page, so that the low bits of an offset are those of the address
    """
    shifts = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # ADD and LDST8 to LDST128, LO12_NC
    [instruction] = struct.unpack_from("<I", memory, place)
    if kind in (282, 283):  # JUMP26, CALL26
        instruction = instruction & ~0x3FFFFFF | (target - place) >> 2 & 0x3FFFFFF
    elif kind == 275:  # ADR_PREL_PG_HI21
        pages = (target >> 12) - (place >> 12)
        instruction = instruction & ~0x60FFFFE0 | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    elif kind in shifts:
        low = (target & 0xFFF) >> shifts[kind]
        instruction = instruction & ~0x3FFC00 | low << 10
    elif kind == 257:  # ABS64
        struct.pack_into("<Q", memory, place, base + target)
        return
    elif kind == 261:  # PREL32
        struct.pack_into("<i", memory, place, target - place)
        return
    else:
        raise ValueError(f"relocation {kind} is not one that the linker knows")
    struct.pack_into("<I", memory, place, instruction)


def _mprotect(address: int, size: int, protection: int) -> None:
    """Change what may be done with pages.

    The kernel makes new code visible to the instruction caches when pages become executable.
    """
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if function(address, size, protection) != 0:
        number = ctypes.get_errno()
        raise OSError(
            number, f"this system does not let a process run code it made: {os.strerror(number)}"
        )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
