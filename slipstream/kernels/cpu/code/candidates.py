"""Code that finds the tokens which a draw may take, so that only they are sorted.

Two passes read the logits: one finds the largest and the sum of probabilities, with how much of it
is near the largest; the other lists the tokens that are near enough. Without top-k and top-p, a
token is listed if its noise is large enough to win. The hash of the noise says so without a
logarithm.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.kernels.cpu.code.body import Body
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module, Variable
from slipstream.kernels.cpu.compiler.values import F32, I32, I64, LANES, VF32, VI32, Value
from slipstream.kernels.cpu.operations import Candidates
from slipstream.kernels.cpu.records import Draw

# How far below the largest scaled logit candidates may be: the first that suffices is taken.
_DISTANCES = (1.0, 2.5, 4.5, 7.0, 11.0)
_SPARE_MASS = 1.0001  # sums in another order differ by less
_SPARE_DISTANCE = (
    0.01  # values of the passes are logits × (1 / temperature), which rounds once more
)
# e to the largest distance between zero and noise below it. Noise of the likeliest token is at
# least the negative of that, and another token must reach it to win.
_LEAST_NOISE_FACTOR = 18.2


class _Row(NamedTuple):
    logits: Value
    vocabulary: Value
    draw: Value
    temperature: Value  # in all lanes
    inverse: Value

    def load(self, f: Function, i: Value) -> Value:
        """Return 16 logits, -inf beyond the vocabulary."""
        inside = v.first_lanes(f, self.vocabulary - i)
        loaded = v.load_masked(f, self.logits + i * 4, inside)
        return f.select(inside, loaded, f.value(VF32, float("-inf")))

    def scaled(self, f: Function, i: Value) -> Value:
        """Return 16 logits, about divided by the temperature."""
        return self.load(f, i) * self.inverse


def candidates(module: Module) -> Function:
    body = Body(module, Candidates)
    f = body.f
    with body.units(body.rows()) as number:
        draw = body["draws"] + number * (4 * Draw.SIZE)
        temperature = v.splat(f, _field(f, draw, Draw.TEMPERATURE))
        place = f.load(I32, draw + 4 * Draw.ROW, 4).to(I64)
        logits = body["logits"] + place * body["stride"]
        row = _Row(logits, body["vocabulary"], draw, temperature, 1.0 / temperature)
        top = _largest(f, row)
        found = body["found"] + number * 16
        f.store(top, found)
        narrows = f.load(I32, draw + 4 * Draw.NARROWS, 4).differs(0)
        bound = _least(f, row, top, found, narrows)
        with f.when(narrows) as branch:
            _list(body, row, number, _Test(top, bound, None))
        with branch.otherwise():
            key = v.splat(f, f.load(I32, draw + 4 * Draw.KEY, 4))
            _list(body, row, number, _Test(top, bound, key))
    return f


def _field(f: Function, draw: Value, field: Draw) -> Value:
    return f.load(F32, draw + 4 * field, 4)


def _largest(f: Function, row: _Row) -> Value:
    top = f.variable(VF32, float("-inf"))
    with f.range(0, row.vocabulary, LANES) as i:
        top.set(v.maximum(f, top.get(), row.load(f, i)))
    return v.horizontal_max(f, top.get() * row.inverse)


def _least(f: Function, row: _Row, top: Value, found: Value, narrows: Value) -> Value:
    """Store the sum of exp(scaled - top); return the lowest value of candidates."""
    sums = [f.variable(VF32, 0.0) for _ in _DISTANCES]
    counts = [f.variable(VF32, 0.0) for _ in _DISTANCES]
    total = f.variable(VF32, 0.0)
    bound = f.variable(F32, top - _field(f, row.draw, Draw.BELOW))
    with f.when(narrows):
        with f.range(0, row.vocabulary, LANES) as i:
            distance = row.scaled(f, i) - v.splat(f, top)
            weight = v.exp(f, distance)
            total.add(weight)
            for limit, share, count in zip(_DISTANCES, sums, counts, strict=True):
                near = distance >= -limit
                share.add(f.select(near, weight, weight.like(0.0)))
                count.add(f.select(near, weight.like(1.0), weight.like(0.0)))
        whole = v.horizontal_sum(f, total.get())
        f.store(whole, found + 4)
        bound.set(float("-inf"))
        wanted = _field(f, row.draw, Draw.MASS) * whole * _SPARE_MASS
        most = _field(f, row.draw, Draw.COUNT)
        for limit, share, count in reversed(list(zip(_DISTANCES, sums, counts, strict=True))):
            by_mass = most.equals(0.0) & (v.horizontal_sum(f, share.get()) >= wanted)
            by_count = (most > 0.0) & (v.horizontal_sum(f, count.get()) >= most)
            with f.when(by_mass | by_count):
                bound.set(top - (limit + _SPARE_DISTANCE))
    return bound.get()


class _Test(NamedTuple):
    top: Value
    bound: Value  # lowest value of a candidate
    key: Value | None  # of the noise, in all lanes; None: the bound alone decides

    def holds(self, f: Function, scaled: Value, i: Value) -> Value:
        near = scaled >= v.splat(f, self.bound)
        if self.key is None:
            return near
        tokens = v.splat(f, i.to(I32)) + v.lane_numbers(f)
        bits = _mix(f, _mix(f, tokens).xor(self.key)) >> 8
        # 1 - uniform noise, rounded down: exact in float32
        rest = ((bits.like(2**24 - 1) - bits).to(VF32)) * 2.0**-24
        reached = v.exp(f, scaled - v.splat(f, self.top)) * _LEAST_NOISE_FACTOR >= rest
        return near & reached


def _mix(f: Function, x: Value) -> Value:
    """As `_mix_32` of kernels/sampling.py."""
    x = x.xor(x >> 16) * _signed(0x7FEB352D)
    x = x.xor(x >> 15) * _signed(0x846CA68B)
    return x.xor(x >> 16)


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _list(body: Body, row: _Row, number: Value, test: _Test) -> None:
    f = body.f
    most = body["most"]
    tokens = body["tokens"] + number * most * 4
    values = body["scaled"] + number * most * 4
    count = f.variable(I64, 0)
    with f.range(0, row.vocabulary, LANES) as i:
        scaled = row.scaled(f, i)
        mask = test.holds(f, scaled, i)
        with f.when(v.any_lane(f, mask)):
            exact = row.load(f, i) / row.temperature
            _append(f, (tokens, values), most, count, i, exact, mask)
    total = count.get()
    stored = f.select(total > most, f.value(I64, -1), total)
    f.store(stored.to(I32), body["found"] + number * 16 + 8)


def _append(
    f: Function,
    targets: tuple[Value, Value],
    most: Value,
    count: Variable,
    first: Value,
    scaled: Value,
    mask: Value,
) -> None:
    """Append the lanes of the mask to the lists of tokens and values, while there is room."""
    for lane in range(LANES):
        inside = v.extract(f, f.select(mask, f.value(VI32, 1), f.value(VI32, 0)), lane)
        with f.when(inside.differs(0)):
            place = count.get()
            with f.when(place < most):
                f.store((first + lane).to(I32), targets[0] + place * 4)
                f.store(v.extract(f, scaled, lane), targets[1] + place * 4)
            count.add(1)
