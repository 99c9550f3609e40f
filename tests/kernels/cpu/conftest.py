import pytest
from cpu_steps import new_team


@pytest.fixture(scope="session", params=[1, 2, 4])
def team(request):
    """Return threads that run operations; more than the machine may have cores."""
    made = new_team(request.param)
    yield made
    made.close()


@pytest.fixture(scope="session")
def pair():
    """Return two threads, for tests that need no other number."""
    made = new_team(2)
    yield made
    made.close()
