"""The module that a repository's `model.py` imports. It exists only in a model's process."""

from slipstream.server.python_models.backend_utils import *  # noqa: F403
