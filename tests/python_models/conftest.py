import pytest


@pytest.fixture(autouse=True, scope="session")
def slow_models_write_elsewhere(tmp_path_factory):
    """Two of the recorded models note what they did in a file; in the working folder unless told
    otherwise.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_MODEL_LOG", str(tmp_path_factory.mktemp("slow") / "slow-model.log"))
        yield
