"""One engine serves the tensor names of 2023 and of v0.18 at once, and both give the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import tritonclient.http as triton
from real_server import RealServer, build_engine, write_repository
from tiny_hf_folder import END, greedy_text, save_model
from tritonclient.utils import np_to_triton_dtype

PROMPTS = ("Born in north", "Hi", "A cat sat on the mat")
TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "gpt2", "gpt2")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Yield clients of the `gpt` repository of September 2023 and the in-flight one of v0.18."""
    folder = tmp_path_factory.mktemp("eras")
    engine = build_engine(model, folder / "engine", "--max_beam_width", "2")
    started = [
        RealServer(
            write_repository(folder / generation, kind, generation, engine), folder / f"run-{kind}"
        )
        for kind, generation in (("gpt", "2023-09"), ("inflight_batcher_llm", "v0.18"))
    ]
    clients = [triton.InferenceServerClient(server.wait().http) for server in started]
    yield clients[0], clients[1]
    for client, server in zip(clients, started, strict=True):
        client.close()
        server.close()


def send(client: Any, model: str, **inputs: numpy.ndarray) -> Any:
    tensors = []
    for name, array in inputs.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return client.infer(model, tensors)


def column(value: Any, kind: str) -> numpy.ndarray:
    return numpy.full((len(PROMPTS), 1), value, dtype=kind)


def texts(*items: str) -> numpy.ndarray:
    return numpy.array([[item.encode()] for item in items], dtype=object)


def test_a_batch_of_prompts_gives_the_same_texts_in_both_repositories(
    servers: tuple[Any, Any], model: Path
) -> None:
    old, new = servers
    nothing = texts(*[""] * len(PROMPTS))
    first = send(
        old,
        "ensemble",
        INPUT_0=texts(*PROMPTS),
        INPUT_1=column(TOKENS, "uint32"),
        INPUT_2=nothing,
        INPUT_3=nothing,
    ).as_numpy("OUTPUT_0")
    second = send(
        new, "ensemble", text_input=texts(*PROMPTS), max_tokens=column(TOKENS, "int32")
    ).as_numpy("text_output")
    expected = [
        prompt + greedy_text(model, prompt, TOKENS, special=True, dtype="float32")
        for prompt in PROMPTS
    ]
    assert [text.decode() for text in first.reshape(-1)] == expected
    assert [text.decode() for text in second.reshape(-1)] == expected


def test_a_batch_of_token_ids_gives_the_same_tokens_in_both_repositories(
    servers: tuple[Any, Any],
) -> None:
    old, new = servers
    nothing = texts(*[""] * len(PROMPTS))
    before = send(
        old,
        "preprocessing",
        QUERY=texts(*PROMPTS),
        BAD_WORDS_DICT=nothing,
        STOP_WORDS_DICT=nothing,
        REQUEST_OUTPUT_LEN=column(TOKENS, "uint32"),
    )
    ids = before.as_numpy("INPUT_ID")
    lengths = before.as_numpy("REQUEST_INPUT_LEN")
    assert [set(row[length:]) <= {END} for row, (length,) in zip(ids, lengths, strict=True)] == [
        True
    ] * 3
    first = send(
        old,
        "tensorrt_llm",
        input_ids=ids,
        input_lengths=lengths,
        request_output_len=column(TOKENS, "uint32"),
        end_id=column(END, "uint32"),
        pad_id=column(END, "uint32"),
        output_log_probs=column(True, "bool"),
    )
    second = send(
        new,
        "tensorrt_llm",
        input_ids=ids,
        input_lengths=lengths,
        request_output_len=column(TOKENS, "int32"),
        end_id=column(END, "int32"),
        return_log_probs=column(True, "bool"),
    )
    rows = first.as_numpy("output_ids")
    others = second.as_numpy("output_ids")
    assert rows.shape == others.shape == (3, 1, max(lengths)[0] + TOKENS)
    for row, other, (length,) in zip(rows[:, 0], others[:, 0], lengths, strict=True):
        assert row[: length + TOKENS].tolist() == other[: length + TOKENS].tolist()
        assert set(row[length + TOKENS :]) <= {END}
        assert set(other[length + TOKENS :]) <= {-1}
    log_probs = first.as_numpy("log_probs")
    assert log_probs.shape == (3, TOKENS, 1)
    numpy.testing.assert_allclose(
        log_probs[:, :, 0], second.as_numpy("output_log_probs")[:, 0], atol=1e-3
    )
    assert "log_probs" not in {
        tensor["name"]
        for tensor in send(
            old,
            "tensorrt_llm",
            input_ids=ids,
            input_lengths=lengths,
            request_output_len=column(TOKENS, "uint32"),
        ).get_response()["outputs"]
    }
    whole = send(old, "postprocessing", TOKENS_BATCH=rows).as_numpy("OUTPUT").reshape(-1)
    assert [
        text.decode().startswith(prompt) for text, prompt in zip(whole, PROMPTS, strict=True)
    ] == [True] * 3


def test_a_batch_with_beams_gives_the_same_beams_in_both_repositories(
    servers: tuple[Any, Any],
) -> None:
    old, new = servers
    ids = numpy.array([[96, 35, 80, END], [96, 41, 70, 77], [96, 34, END, END]], dtype="int32")
    lengths = numpy.array([[3], [4], [2]], dtype="int32")
    first = send(
        old,
        "tensorrt_llm",
        input_ids=ids,
        input_lengths=lengths,
        beam_width=column(2, "uint32"),
        request_output_len=column(TOKENS, "uint32"),
        end_id=column(END, "uint32"),
    )
    second = send(
        new,
        "tensorrt_llm",
        input_ids=ids,
        input_lengths=lengths,
        beam_width=column(2, "int32"),
        request_output_len=column(TOKENS, "int32"),
        end_id=column(END, "int32"),
    )
    rows = first.as_numpy("output_ids")
    others = second.as_numpy("output_ids")
    assert rows.shape == (3, 2, 4 + TOKENS)
    assert numpy.where(others < 0, END, others).tolist() == rows.tolist()
    assert [row.tolist() != other.tolist() for row, other in rows] == [True] * 3
    assert send(old, "postprocessing", TOKENS_BATCH=rows).as_numpy("OUTPUT").size == 6


def test_comma_separated_words_of_2023_equal_a_list_of_words(
    servers: tuple[Any, Any], model: Path
) -> None:
    old, new = servers
    answers = [
        greedy_text(model, prompt, TOKENS, special=True, dtype="float32") for prompt in PROMPTS
    ]
    letters = sorted({answer[0] for answer in answers} - {","})[:2]
    bad = texts(*[", ".join(letters)] * len(PROMPTS))
    first = (
        send(
            old,
            "ensemble",
            INPUT_0=texts(*PROMPTS),
            INPUT_1=column(TOKENS, "uint32"),
            INPUT_2=bad,
            INPUT_3=texts(*[""] * len(PROMPTS)),
        )
        .as_numpy("OUTPUT_0")
        .reshape(-1)
    )
    listed = numpy.array([[letter.encode() for letter in letters]] * len(PROMPTS), dtype=object)
    second = (
        send(
            new,
            "ensemble",
            text_input=texts(*PROMPTS),
            max_tokens=column(TOKENS, "int32"),
            bad_words=listed,
        )
        .as_numpy("text_output")
        .reshape(-1)
    )
    assert first.tolist() == second.tolist()
    for text, prompt in zip(first, PROMPTS, strict=True):
        assert not set(letters) & set(text.decode()[len(prompt) :])
    ids = send(
        old,
        "preprocessing",
        QUERY=texts(*PROMPTS),
        BAD_WORDS_DICT=bad,
        STOP_WORDS_DICT=texts("one", "one, two", ""),
        REQUEST_OUTPUT_LEN=column(1, "uint32"),
    )
    assert ids.as_numpy("STOP_WORDS_IDS")[:, 1].tolist() == [
        [3, -1, -1, -1, -1, -1],
        [3, 6, -1, -1, -1, -1],
        [-1] * 6,
    ]
