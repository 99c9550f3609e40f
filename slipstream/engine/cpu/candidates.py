"""Finds the tokens that draws may take with compiled code. numpy then draws one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.engine.sampler import Draw
from slipstream.kernels.cpu.memory import aligned
from slipstream.kernels.cpu.operations import Candidates as Operation
from slipstream.kernels.cpu.operations import Entry, encode
from slipstream.kernels.cpu.records import Context
from slipstream.kernels.cpu.records import Draw as Field
from slipstream.kernels.cpu.team import Team
from slipstream.kernels.sampling import Candidates

_MOST = 2048  # candidates of a draw; with more, numpy takes the whole vocabulary
_NOISE_RANGE = 25.0  # noise makes up for less than this
_SPARE = 0.01


class CandidateFinder:
    def __init__(self, team: Team) -> None:
        self._team = team
        self._rows = 0

    def __call__(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[Candidates | None]:
        """Return the candidates of each draw; None where they must be found in another way.

        logits: float32 [samples, vocab]
        """
        if logits.strides[1] != logits.itemsize:
            return [None] * len(draws)
        if len(draws) > self._rows:
            self._allocate(len(draws))
        for number, draw in enumerate(draws):
            self._describe(number, draw)
        operation = Operation(
            logits=logits.ctypes.data,
            stride=logits.strides[0],
            vocabulary=logits.shape[1],
            draws=self._draws.ctypes.data,
            most=_MOST,
            tokens=self._tokens.ctypes.data,
            scaled=self._scaled.ctypes.data,
            found=self._found.ctypes.data,
        )
        program = encode([Entry(operation)])
        context = aligned(8 * Context.SIZE).view(np.int64)
        context[Context.PROGRAM] = program.ctypes.data
        context[Context.OPERATIONS] = 1
        context[Context.TOKENS] = len(draws)
        self._team.run(int(context.ctypes.data))
        return [self._take(number, draw) for number, draw in enumerate(draws)]

    def _allocate(self, rows: int) -> None:
        self._rows = rows
        self._draws = np.zeros((rows, Field.SIZE), dtype=np.float32)
        self._tokens = np.zeros((rows, _MOST), dtype=np.int32)
        self._scaled = np.zeros((rows, _MOST), dtype=np.float32)
        self._found = np.zeros((rows, 4), dtype=np.float32)

    def _describe(self, number: int, draw: Draw) -> None:
        fields = self._draws[number]
        numbers = fields.view(np.uint32)
        parameters = draw.parameters
        fields[Field.TEMPERATURE] = parameters.temperature
        numbers[Field.KEY] = draw.key
        numbers[Field.NARROWS] = parameters.narrows
        fields[Field.COUNT] = parameters.top_k
        fields[Field.MASS] = draw.top_p
        below = _NOISE_RANGE
        if parameters.min_p > 0:
            below = min(below, _SPARE - float(np.log(parameters.min_p)))
        fields[Field.BELOW] = below
        numbers[Field.ROW] = draw.sample

    def _take(self, number: int, draw: Draw) -> Candidates | None:
        count = int(self._found[number].view(np.int32)[2])
        # typical-p needs all probabilities, unless it follows top-k and top-p
        if count <= 0 or (draw.parameters.typical_p < 1.0 and not draw.parameters.narrows):
            return None
        top, total = self._found[number, :2]
        tokens = self._tokens[number, :count].astype(np.int64)
        mass = top + np.log(total) if draw.parameters.narrows else np.float32(0)
        return Candidates(tokens, self._scaled[number, :count], mass)
