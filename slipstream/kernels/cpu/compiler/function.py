"""Writes functions in LLVM's intermediate representation, so that a kernel reads like a kernel.

Variables and loop counters live in stack slots, which LLVM turns into registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slipstream.kernels.cpu.compiler.instruction_levels import Level
from slipstream.kernels.cpu.compiler.values import I64, VF32, Value, constant_text


class Variable:
    """A value that changes."""

    def __init__(self, function: Function, kind: str, slot: str) -> None:
        self._function = function
        self._slot = slot
        self.kind = kind

    def get(self) -> Value:
        return self._function.emit(self.kind, f"load {self.kind}, ptr {self._slot}")

    def set(self, value: Value | int | float) -> None:
        value = self._function.value(self.kind, value)
        self._function.write(f"store {value.typed}, ptr {self._slot}")

    def add(self, value: Value | int | float) -> None:
        self.set(self.get() + value)


class Branch:
    """A condition whose other side may be written, too."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self.other: str | None = None

    @contextmanager
    def otherwise(self) -> Iterator[None]:
        """Write what happens if the condition does not hold, directly behind the first side."""
        function = self._function
        assert self.other is not None
        done = function.new_label()
        # the first side ended with a jump to the label `other`, which is now behind the second side
        position = function.jump_place
        function.lines[position] = f"br label %{done}"
        yield
        function.write(f"br label %{done}")
        function.start(done)


class Loop:
    def __init__(self, function: Function, end: str) -> None:
        self._function = function
        self._end = end

    def leave_if(self, condition: Value) -> None:
        following = self._function.new_label()
        self._function.write(f"br i1 {condition.text}, label %{self._end}, label %{following}")
        self._function.start(following)


class Function:
    """A function whose parameters are `i64` unless `kinds` says otherwise."""

    def __init__(
        self,
        module: Module,
        name: str,
        parameters: int,
        returns: str = "void",
        exported: bool = False,
        inlined: bool = False,
    ) -> None:
        self.module = module
        self.level = module.level
        self.name = name
        self.returns = returns
        self.lines: list[str] = []
        self.jump_place = 0
        self._slots: list[str] = []
        self._numbers = 0
        self._exported = exported
        self._inlined = inlined
        self.parameters = tuple(Value(self, I64, f"%p{i}") for i in range(parameters))

    # Text

    def write(self, line: str) -> None:
        self.lines.append(line)

    def emit(self, kind: str, operation: str) -> Value:
        """Write an operation and return its result."""
        self._numbers += 1
        name = f"%v{self._numbers}"
        self.write(f"{name} = {operation}")
        return Value(self, kind, name)

    def new_label(self) -> str:
        self._numbers += 1
        return f"b{self._numbers}"

    def start(self, label: str) -> None:
        self.write(f"{label}:")

    def finished(self) -> str:
        """Return the text of the whole function."""
        linkage = "" if self._exported else "internal "
        parameters = ", ".join(f"i64 %p{i}" for i in range(len(self.parameters)))
        attribute = "alwaysinline" if self._inlined else "noinline"
        end = "ret void" if self.returns == "void" else ""
        body = "\n".join([*self._slots, *self.lines, end])
        head = f"define {linkage}{self.returns} @{self.name}({parameters}) {attribute} #0"
        return f"{head} {{\n{body}\n}}\n"

    # Values

    def value(self, kind: str, number: Value | int | float) -> Value:
        if isinstance(number, Value):
            if number.kind != kind:
                raise TypeError(f"{number.kind} is not {kind}")
            return number
        return Value(self, kind, constant_text(kind, number))

    def variable(self, kind: str, value: Value | int | float) -> Variable:
        self._numbers += 1
        slot = f"%s{self._numbers}"
        self._slots.append(f"{slot} = alloca {kind}")
        made = Variable(self, kind, slot)
        made.set(value)
        return made

    def accumulators(self, rows: int, columns: int) -> list[list[Variable]]:
        """Return variables [rows][columns] of 16 floats, which are zero."""
        return [self._row_of_accumulators(columns) for _ in range(rows)]

    def _row_of_accumulators(self, columns: int) -> list[Variable]:
        return [self.variable(VF32, 0.0) for _ in range(columns)]

    def select(self, condition: Value, yes: Value | int, no: Value | int) -> Value:
        """Return one of two values; of two integers if both are Python's numbers."""
        if isinstance(yes, Value):
            no = yes.like(no)
        elif isinstance(no, Value):
            yes = no.like(yes)
        else:
            yes = self.value(I64, yes)
            no = self.value(I64, no)
        return self.emit(yes.kind, f"select {condition.typed}, {yes.typed}, {no.typed}")

    def least(self, left: Value, right: Value | int) -> Value:
        return self.select(left < right, left, right)

    def most(self, left: Value, right: Value | int) -> Value:
        return self.select(left > right, left, right)

    # Memory

    def load(self, kind: str, address: Value, align: int = 1) -> Value:
        place = self.emit("ptr", f"inttoptr {address.typed} to ptr")
        return self.emit(kind, f"load {kind}, ptr {place.text}, align {align}")

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        place = self.emit("ptr", f"inttoptr {address.typed} to ptr")
        self.write(f"store {value.typed}, ptr {place.text}, align {align}")

    def field(self, record: Value, index: int, kind: str = I64) -> Value:
        """Return a field of a record of 64-bit fields."""
        return self.load(kind, record + 8 * index, 8 if kind == I64 else 4)

    def set_field(self, record: Value, index: int, value: Value | int) -> None:
        self.store(self.value(I64, value), record + 8 * index, 8)

    def atomic_add(self, address: Value, number: int) -> Value:
        """Add to a shared number; return what it was."""
        place = self.emit("ptr", f"inttoptr {address.typed} to ptr")
        return self.emit(I64, f"atomicrmw add ptr {place.text}, i64 {number} seq_cst, align 8")

    def load_shared(self, address: Value) -> Value:
        place = self.emit("ptr", f"inttoptr {address.typed} to ptr")
        return self.emit(I64, f"load atomic i64, ptr {place.text} acquire, align 8")

    def store_shared(self, value: Value | int, address: Value) -> None:
        place = self.emit("ptr", f"inttoptr {address.typed} to ptr")
        text = self.value(I64, value).typed
        self.write(f"store atomic {text}, ptr {place.text} seq_cst, align 8")

    # Calls

    def intrinsic(self, kind: str, name: str, *arguments: Value) -> Value:
        types = ", ".join(argument.kind for argument in arguments)
        self.module.declare(f"declare {kind} @{name}({types})")
        listed = ", ".join(argument.typed for argument in arguments)
        if kind == "void":
            self.write(f"call void @{name}({listed})")
            return Value(self, kind, "")
        return self.emit(kind, f"call {kind} @{name}({listed})")

    def system_call(self, number: int, *arguments: Value | int) -> None:
        self.module.declare("declare i64 @syscall(i64, ...)")
        listed = ", ".join(self.value(I64, argument).typed for argument in (number, *arguments))
        self.emit(I64, f"call i64 (i64, ...) @syscall({listed})")

    def call(self, function: Function, *arguments: Value | int) -> Value:
        listed = ", ".join(self.value(I64, argument).typed for argument in arguments)
        if len(arguments) != len(function.parameters):
            raise TypeError(f"{function.name} takes {len(function.parameters)} arguments")
        if function.returns == "void":
            self.write(f"call void @{function.name}({listed})")
            return Value(self, "void", "")
        return self.emit(function.returns, f"call {function.returns} @{function.name}({listed})")

    # Control

    @contextmanager
    def when(self, condition: Value) -> Iterator[Branch]:
        branch = Branch(self)
        inside = self.new_label()
        branch.other = self.new_label()
        self.write(f"br i1 {condition.text}, label %{inside}, label %{branch.other}")
        self.start(inside)
        yield branch
        self.jump_place = len(self.lines)
        self.write(f"br label %{branch.other}")
        self.start(branch.other)

    @contextmanager
    def loop(self) -> Iterator[Loop]:
        """Repeat until `leave_if`."""
        begin = self.new_label()
        end = self.new_label()
        self.write(f"br label %{begin}")
        self.start(begin)
        yield Loop(self, end)
        self.write(f"br label %{begin}")
        self.start(end)

    @contextmanager
    def range(self, start: Value | int, end: Value | int, step: Value | int = 1) -> Iterator[Value]:
        counter = self.variable(I64, start)
        last = self.value(I64, end)
        by = self.value(I64, step)
        with self.loop() as loop:
            index = counter.get()
            loop.leave_if(index >= last)
            yield index
            counter.set(index + by)

    def choose(
        self, number: Value, cases: Sequence[tuple[int, Function]], *arguments: Value
    ) -> None:
        """Call the function of the case that equals the number; none if there is no such case."""
        done = self.new_label()
        labels = [(case, self.new_label(), function) for case, function in cases]
        listed = " ".join(f"i64 {case}, label %{label}" for case, label, _ in labels)
        self.write(f"switch i64 {number.text}, label %{done} [{listed}]")
        for _, label, function in labels:
            self.start(label)
            self.call(function, *arguments)
            self.write(f"br label %{done}")
        self.start(done)


class Module:
    """Functions that are compiled together, for one instruction level."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._functions: list[Function] = []
        self._declarations: dict[str, None] = {}

    def function(
        self,
        name: str,
        parameters: int,
        returns: str = "void",
        exported: bool = False,
        inlined: bool = False,
    ) -> Function:
        made = Function(self, name, parameters, returns, exported, inlined)
        self._functions.append(made)
        return made

    def declare(self, declaration: str) -> None:
        self._declarations[declaration] = None

    def text(self) -> str:
        """Return the module as text."""
        attributes = 'attributes #0 = { nounwind "frame-pointer"="none"'
        if self.level.vector_bits:
            bits = self.level.vector_bits
            attributes += f' "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}"'
        parts = [*self._declarations, *(f.finished() for f in self._functions), attributes + " }"]
        return "\n".join(parts) + "\n"
