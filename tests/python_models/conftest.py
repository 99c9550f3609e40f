import pytest


@pytest.fixture(autouse=True, scope="session")
def slow_models_write_elsewhere(tmp_path_factory):
    """Two of the recorded models write a log file, by default into the working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_MODEL_LOG", str(tmp_path_factory.mktemp("slow") / "slow-model.log"))
        yield
