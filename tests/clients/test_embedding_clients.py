"""Client libraries that embed and rerank, against a tiny embedding model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from client_environment import environment
from pooling_server import LAST, MODEL, add_modules, pooling_server, save_pooling_model

pytestmark = pytest.mark.clients

SCRIPT = Path(__file__).parent / "scripts" / "embedding_client.py"
REQUIREMENTS = ("cohere", "langchain-openai", "litellm")
QUERY = "What is red?"
DOCUMENTS = ["A rose.", "The sky is blue.", "Nothing at all."]
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}


def test_cohere_langchain_and_litellm(tmp_path: Path) -> None:
    save_pooling_model(tmp_path / "hf", "qwen2", "Qwen2ForCausalLM")
    add_modules(tmp_path / "hf", LAST, "Normalize")
    python = environment("embeddings", REQUIREMENTS)
    with pooling_server(tmp_path, "Qwen2ForCausalLM") as server:
        root = f"http://127.0.0.1:{server.port}"
        finished = subprocess.run(
            [python, SCRIPT, root, MODEL, QUERY, *DOCUMENTS],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **OFFLINE, "PYTHONPATH": ""},
        )
        assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
        answer = server.client.embeddings.create(model=MODEL, input=[QUERY, *DOCUMENTS])
    found = json.loads(finished.stdout.splitlines()[-1])
    vectors = np.array([one.embedding for one in answer.data])
    for library in ("langchain", "litellm"):
        np.testing.assert_allclose(found[library], vectors[1:], atol=1e-6)
    scores = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [index for index, _ in found["cohere v2"]] == order[:2]
    for library in ("litellm rerank", "cohere v1"):
        assert [index for index, _ in found[library]] == order
        for index, score in found[library]:
            assert score == pytest.approx(scores[index], abs=1e-6)
    assert found["cohere texts"] == [DOCUMENTS[index] for index in order]
