"""The fields of the records that compiled code reads besides those of operations."""

from __future__ import annotations

from enum import IntEnum


class Header(IntEnum):
    KIND = 0
    BARRIER = 1  # 1: a barrier follows; 2: one follows unless the step is private
    ALONE = 2  # 1: in a private step each thread computes all units for itself
    ROWS = 3


class Context(IntEnum):
    """The fields of a step's context."""

    PROGRAM = 0
    OPERATIONS = 1
    TOKENS = 2
    SAMPLES = 3
    LOGITS = 4
    PRIVATE = 5  # 1: one token, and threads repeat small work rather than wait for each other
    TOKEN_IDS = 6  # int64 [tokens]
    POSITIONS = 7  # int64 [tokens]
    SLOTS = 8  # int64 [tokens]: cache slots of their keys and values
    SAMPLE_TOKENS = 9  # int64 [samples]
    EMBEDDINGS = 10  # int64 [tokens]: address of a given embedding, or 0; the field is 0 if none
    SINGLES = 11  # rows of one token
    SINGLE_LIST = 12  # int64 [singles, 3]: token, length with this token, address of its table
    TILES = 13
    TILE_LIST = 14  # int64 [tiles, 4]: first token, tokens, first position, address of the table
    SPLIT = 15  # number of chunks that a single's positions are divided into; 0: not divided
    PARTS = 16  # address of the results of chunks
    BLOCK_TOKENS = 17
    LOGIT_TARGET = 18  # float32 [logits, padded vocabulary]
    SIZE = 24


class Thread(IntEnum):
    """The fields of a thread's record."""

    INDEX = 0
    THREADS = 1
    TEAM = 2
    WORK = 3  # divided operations so far
    TILE = 4  # memory for a tile of results
    ROW = 5  # memory for a float32 row
    ATTENTION = 6  # memory for attention
    COUNTER = 8  # of the units of a private operation
    SIZE = 16


class Team(IntEnum):
    """Offsets in the memory that threads share, in bytes. Each has a cache line of its own."""

    ARRIVED = 0
    PHASE = 64
    SLEEPERS = 128
    JOB = 192  # address of the context
    STOP = 256
    SPINS = 320  # pauses before a waiting thread sleeps
    COUNTERS = 384  # [4 divided operations, threads]


class Draw(IntEnum):
    """Fields of a draw, 32 bits each. KEY, NARROWS and ROW are whole numbers, the others floats."""

    TEMPERATURE = 0
    KEY = 1  # of the noise
    NARROWS = 2  # 1: candidates have COUNT tokens, or the share MASS of the probability
    COUNT = 3
    MASS = 4
    BELOW = 5  # without NARROWS, candidates are at most this much below the largest
    ROW = 6  # of the logits
    SIZE = 8
