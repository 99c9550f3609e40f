import pytest
from cpu_steps import best_level, new_team

from slipstream.kernels.cpu.compiler.instruction_levels import possible_levels
from slipstream.kernels.cpu.machine import read_cpu

BEST, *OTHERS = possible_levels(read_cpu()[1])
# more threads than the machine may have cores, and the code of every level that it can run
TEAMS = [(BEST, 1), (BEST, 8), *((level, 2) for level in OTHERS)]


@pytest.fixture(scope="session", params=TEAMS, ids=lambda team: f"{team[0].name}-{team[1]}")
def team(request):
    """Return threads that run operations."""
    level, threads = request.param
    made = new_team(threads, level)
    yield made
    made.close()


@pytest.fixture(scope="session")
def pair():
    """Return two threads with the best code, for tests that need no other number."""
    made = new_team(2, best_level())
    yield made
    made.close()
