"""Typed values of LLVM's intermediate representation (IR), with Python's operators.

A value is the text that names it, its type and the function that it belongs to. Numbers of Python
become constants of the other operand's type. Memory is addressed by `i64` values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.kernels.cpu.compiler.function import Function

I1 = "i1"
I8 = "i8"
I16 = "i16"
I32 = "i32"
I64 = "i64"
F16 = "half"
BF16 = "bfloat"
F32 = "float"
LANES = 16  # of the vectors that kernels compute with


def vector(element: str, lanes: int = LANES) -> str:
    """Return the vector type of these elements."""
    return f"<{lanes} x {element}>"


VF32 = vector(F32)
VI32 = vector(I32)
VI16 = vector(I16)


def element_of(kind: str) -> str:
    """Return the type of a vector's lanes, or the scalar type itself."""
    return kind.partition(" x ")[2][:-1] if kind.startswith("<") else kind


def lanes_of(kind: str) -> int:
    """Return the number of lanes of a vector type; 1 for a scalar type."""
    return int(kind[1:].partition(" x ")[0]) if kind.startswith("<") else 1


def is_float(kind: str) -> bool:
    return element_of(kind) in (F16, BF16, F32)


def constant_text(kind: str, number: int | float) -> str:
    """Return a constant of that type, the same in every lane."""
    element = element_of(kind)
    if is_float(kind):
        rounded = struct.unpack("f", struct.pack("f", number))[0]
        text = "0x" + struct.pack(">d", rounded).hex().upper()
    else:
        text = str(int(number))
    return f"splat ({element} {text})" if kind.startswith("<") else text


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    function: Function
    kind: str
    text: str

    @property
    def typed(self) -> str:
        return f"{self.kind} {self.text}"

    def like(self, other: Value | int | float) -> Value:
        """Return the operand as a value of this type."""
        if isinstance(other, Value):
            if other.kind != self.kind:
                raise TypeError(f"{self.kind} and {other.kind} cannot be combined")
            return other
        return Value(self.function, self.kind, constant_text(self.kind, other))

    def _binary(self, integer: str, real: str, other: Value | int | float) -> Value:
        name = real if is_float(self.kind) else integer
        right = self.like(other)
        return self.function.emit(self.kind, f"{name} {self.typed}, {right.text}")

    def __add__(self, other: Value | int | float) -> Value:
        return self._binary("add", "fadd", other)

    def __sub__(self, other: Value | int | float) -> Value:
        return self._binary("sub", "fsub", other)

    def __mul__(self, other: Value | int | float) -> Value:
        return self._binary("mul", "fmul", other)

    def __radd__(self, other: int | float) -> Value:
        return self.like(other) + self

    def __rsub__(self, other: int | float) -> Value:
        return self.like(other) - self

    def __rmul__(self, other: int | float) -> Value:
        return self.like(other) * self

    def __truediv__(self, other: Value | int | float) -> Value:
        return self._binary("sdiv", "fdiv", other)

    def __rtruediv__(self, other: int | float) -> Value:
        return self.like(other) / self

    def __floordiv__(self, other: Value | int) -> Value:
        """Divide numbers that are not negative."""
        return self._binary("udiv", "fdiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("urem", "frem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and", "and", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or", "or", other)

    def xor(self, other: Value | int) -> Value:
        return self._binary("xor", "xor", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("shl", "shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        """Shift zeros in."""
        return self._binary("lshr", "lshr", other)

    def __neg__(self) -> Value:
        if is_float(self.kind):
            return self.function.emit(self.kind, f"fneg {self.typed}")
        return self.like(0) - self

    def _compare(self, integer: str, real: str, other: Value | int | float) -> Value:
        lanes = lanes_of(self.kind)
        kind = I1 if lanes == 1 else vector(I1, lanes)
        name = f"fcmp {real}" if is_float(self.kind) else f"icmp {integer}"
        return self.function.emit(kind, f"{name} {self.typed}, {self.like(other).text}")

    def __lt__(self, other: Value | int | float) -> Value:
        return self._compare("slt", "olt", other)

    def __le__(self, other: Value | int | float) -> Value:
        return self._compare("sle", "ole", other)

    def __gt__(self, other: Value | int | float) -> Value:
        return self._compare("sgt", "ogt", other)

    def __ge__(self, other: Value | int | float) -> Value:
        return self._compare("sge", "oge", other)

    def equals(self, other: Value | int | float) -> Value:
        return self._compare("eq", "oeq", other)

    def differs(self, other: Value | int | float) -> Value:
        return self._compare("ne", "one", other)

    def is_nan(self) -> Value:
        return self._compare("eq", "uno", self)

    def to(self, kind: str) -> Value:
        """Return the number in another type, lane by lane. Integers are signed."""
        if kind == self.kind:
            return self
        return self.function.emit(kind, f"{_conversion(self.kind, kind)} {self.typed} to {kind}")

    def unsigned_to(self, kind: str) -> Value:
        """Widen an integer that is not negative."""
        return self.function.emit(kind, f"zext {self.typed} to {kind}")

    def bits(self, kind: str) -> Value:
        """Return the same bits as another type."""
        return self.function.emit(kind, f"bitcast {self.typed} to {kind}")


_WIDTH = {I1: 1, I8: 8, I16: 16, I32: 32, I64: 64, F16: 16, BF16: 16, F32: 32}


def _conversion(source: str, target: str) -> str:
    wider = _WIDTH[element_of(target)] > _WIDTH[element_of(source)]
    if is_float(source) and is_float(target):
        return "fpext" if wider else "fptrunc"
    if is_float(source):
        return "fptosi"
    if is_float(target):
        return "sitofp"
    return "sext" if wider else "trunc"
