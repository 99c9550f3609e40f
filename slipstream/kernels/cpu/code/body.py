"""What the code of every operation begins with: its fields, its rows, the division of its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.kernels.cpu.compiler.function import Function, Module
from slipstream.kernels.cpu.compiler.values import F32, I32, I64, Value
from slipstream.kernels.cpu.layout import LINE, RINGS
from slipstream.kernels.cpu.operations import Operation, field_index, is_float_field
from slipstream.kernels.cpu.records import Context, Header, Team, Thread


class Body:
    """The function of an operation, with parameters (record, context, thread), or a part of it.

    A part names its function. It sets those of record, context and thread that it takes.
    """

    record: Value
    context: Value
    thread: Value

    def __init__(
        self, module: Module, operation: type[Operation], name: str = "", parameters: int = 3
    ) -> None:
        self.operation = operation
        self.f = module.function(name or f"op_{operation.__name__.lower()}", parameters)
        if not name:
            self.record, self.context, self.thread = self.f.parameters

    def __getitem__(self, name: str) -> Value:
        """Return a field of the operation."""
        kind = F32 if is_float_field(self.operation, name) else I64
        return self.f.field(self.record, field_index(self.operation, name), kind)

    def step(self, field: Context) -> Value:
        """Return a field of the step's context."""
        return self.f.field(self.context, field)

    def own(self, field: Thread) -> Value:
        """Return a field of the thread."""
        return self.f.field(self.thread, field)

    def rows(self) -> Value:
        """Return the number of rows that the operation computes."""
        kind = self.f.field(self.record, Header.ROWS)
        return self.f.load(I64, self.context + (kind + int(Context.TOKENS)) * 8, 8)

    def alone(self) -> Value:
        """Return whether each thread computes all units for itself."""
        alone = self.f.field(self.record, Header.ALONE) & self.step(Context.PRIVATE)
        return alone.differs(0)

    def own_buffer(self, address: str, distance: str) -> Value:
        """Return the address of a buffer. Each thread has its own in a private step."""
        offset = self.own(Thread.INDEX) * self[distance]
        private = self.step(Context.PRIVATE).differs(0)
        return self[address] + self.f.select(private, offset, 0)

    def source_row(self, row: Value) -> Value:
        """Return the row that row number `row` is read from."""
        f = self.f
        chosen = f.variable(I64, row)
        with f.when(self["gather"].differs(0)):
            chosen.set(f.load(I64, self.step(Context.SAMPLE_TOKENS) + row * 8, 8))
        return chosen.get()

    @contextmanager
    def units(self, total: Value) -> Iterator[Value]:
        """Divide `total` units among the threads.

        A thread begins with its own contiguous share and then takes units of others. Each share
        has a counter. A thread clears its counter of the operation after next: by then, all threads
        have left the operation before this one.
        """
        f = self.f
        alone = self.alone()
        threads = f.variable(I64, 1)
        index = f.variable(I64, 0)
        counters = f.variable(I64, self.thread + 8 * int(Thread.COUNTER))
        with f.when(alone) as branch:
            f.set_field(self.thread, Thread.COUNTER, 0)
        with branch.otherwise():
            threads.set(self.own(Thread.THREADS))
            index.set(self.own(Thread.INDEX))
            work = self.own(Thread.WORK)
            f.set_field(self.thread, Thread.WORK, work + 1)
            shared = self.own(Thread.TEAM) + int(Team.COUNTERS)
            row = threads.get() * LINE
            cleared = shared + ((work + 2) & (RINGS - 1)) * row + index.get() * LINE
            f.store_shared(0, cleared)
            counters.set(shared + (work & (RINGS - 1)) * row)
        count = threads.get()
        base = counters.get()
        first = index.get()
        with f.range(0, count) as turn:
            share = (first + turn) % count
            begin = share * total // count
            end = (share + 1) * total // count
            counter = base + share * LINE
            with f.loop() as loop:
                unit = begin + f.atomic_add(counter, 1)
                loop.leave_if(unit >= end)
                yield unit


def load_i32(f: Function, address: Value) -> Value:
    return f.load(I32, address, 4).to(I64)
