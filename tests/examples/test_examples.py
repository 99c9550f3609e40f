"""The programs of examples/ against a server with a tiny model."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from client_environment import environment
from openai_server import TEMPLATE
from real_server import ROOT, RealServer, limit_cache
from tiny_adapters import save_adapter
from tiny_hf_folder import save_model

from slipstream.cli.commands import run_command

EXAMPLES = ROOT / "examples"
MODEL = "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    # a description of two functions takes 864 tokens of one character each
    save_model(folder / MODEL, max_position_embeddings=2048)
    (folder / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    return folder / MODEL


@pytest.fixture(scope="module")
def server(folder: Path, model: Path) -> Iterator[RealServer]:
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    save_adapter(base, folder / "adapters" / "pirate")
    repository = folder / "repository"
    flags = ["-m", MODEL, "-s", str(model), "--repo", str(repository), "--dtype", "float32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(folder / "home"))
        assert run_command("import", [*flags, "--lora-dir", str(folder / "adapters")]) == 0
    limit_cache(repository)
    shutil.copytree(EXAMPLES / "model_py" / "models" / "mask", repository / "mask")
    command = [
        "-m",
        "slipstream.cli.main",
        "start",
        "--repo",
        str(repository),
        "--dtype",
        "float32",
    ]
    running = RealServer(repository, folder, *command, "--allow-python-models")
    yield running.wait(120)
    running.close()


def run(example: str, *arguments: object, python: Path | str = sys.executable) -> str:
    """Return what an example prints."""
    finished = subprocess.run(
        [python, EXAMPLES / example, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished.stdout


def post(server: RealServer, path: str, **body: object) -> dict:
    answer = httpx.post(f"http://{server.http}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat_text(server: RealServer, question: str, tokens: int) -> str:
    message = {"role": "user", "content": question}
    answer = post(
        server,
        "/v1/chat/completions",
        model=MODEL,
        messages=[message],
        max_tokens=tokens,
        temperature=0,
    )
    return answer["choices"][0]["message"]["content"]


def generate(server: RealServer, text: str, tokens: int, model: str = "ensemble") -> str:
    body = {"text_input": text, "max_tokens": tokens}
    return post(server, f"/v2/models/{model}/generate", **body)["text_output"]


def test_openai_chat(server: RealServer):
    printed = run("openai_chat.py", "Why?", "--url", f"http://{server.http}", "--max-tokens", 12)
    assert printed.startswith(f"{MODEL}: {chat_text(server, 'Why?', 12)}\n(12 tokens)\n")
    shares = [float(share) for share in re.findall(r"([\d.]+)%", printed)]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)


def test_triton_http(server: RealServer):
    printed = run(
        "triton_http.py", "One, two,", "--url", f"http://{server.http}", "--max-tokens", 9
    )
    text, _, likelihood = printed.rstrip("\n").rpartition("\nlog-probability: ")
    assert text == generate(server, "One, two,", 9)
    assert float(likelihood) < 0


def test_triton_grpc_stream(server: RealServer):
    # many tokens: a busy server sends those that are ready in one piece
    flags = ["--url", server.grpc, "--max-tokens", 200]
    expected = generate(server, "Once", 200)
    printed = run("triton_grpc_stream.py", "Once", *flags)
    text, _, pieces = printed.rstrip("\n").rpartition("\n")
    assert text == expected
    assert int(re.fullmatch(r"\((\d+) pieces\)", pieces)[1]) > 1
    printed = run("triton_grpc_stream.py", "Once", *flags, "--stop-after", 1)
    text, _, end = printed.rstrip("\n").rpartition("\n")
    assert end == "(cancelled after 1 pieces)"
    assert expected.startswith(text)
    assert len(text) < len(expected)


def test_guided_extraction(server: RealServer):
    printed = run("guided_extraction.py", "Ann is 31.", "--url", f"http://{server.http}")
    person = json.loads(printed)
    assert person.keys() == {"name", "age", "places"}
    assert 0 <= person["age"] <= 130


def test_tools_agent(server: RealServer):
    flags = ["--url", f"http://{server.http}", "--force", "multiply"]
    call = run("tools_agent.py", "17 times 23?", *flags).splitlines()[0]
    found = re.fullmatch(r"call: multiply\((\{.*\})\) = (.*)", call)
    arguments = json.loads(found[1])
    assert int(found[2]) == arguments["first"] * arguments["second"]


def test_lora_adapter_by_name(server: RealServer):
    flags = ["--url", f"http://{server.http}", "--max-tokens", 8]
    plain, adapted = run("lora/use_adapter.py", "pirate", "Rum?", *flags).splitlines()
    answers = {}
    for name in (MODEL, "pirate"):
        body = {"model": name, "prompt": "Rum?", "max_tokens": 8, "temperature": 0}
        answers[name] = post(server, "/v1/completions", **body)["choices"][0]["text"].strip()
    assert (plain, adapted) == (f"{MODEL}: {answers[MODEL]}", f"pirate: {answers['pirate']}")
    assert answers[MODEL] != answers["pirate"]


def test_a_trained_adapter_has_learned(server: RealServer, folder: Path, model: Path):
    text = folder / "lines.txt"
    text.write_text("abc abc abc abc\n" * 2)
    adapter = folder / "adapters" / "trained"
    flags = ["--model", model, "--text", text, "--epochs", 8, "--rate", "0.02"]
    losses = re.findall(r"loss ([\d.]+)", run("lora/train_adapter.py", adapter, *flags))
    assert len(losses) == 8
    assert float(losses[-1]) < float(losses[0])
    # a new folder is found without a restart
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
    trained = post(server, "/v1/completions", model="trained", **body)["choices"][0]["text"]
    assert trained != post(server, "/v1/completions", model=MODEL, **body)["choices"][0]["text"]


def test_model_py(server: RealServer):
    text = "Ask bob.b@mail.example.com and 12345678 now"
    flags = ["--url", f"http://{server.http}", "--max-tokens", 7]
    hidden, _, answer = run("model_py/client.py", text, *flags).rstrip("\n").partition("\n")
    assert hidden == "hidden: 2"
    assert answer == generate(server, "Ask *** and *** now", 7)


def test_offline_texts(server: RealServer, folder: Path, model: Path):
    prompts = folder / "prompts.txt"
    prompts.write_text("One\n\nTwo, three\n")
    answers = folder / "answers.jsonl"
    flags = ["--model", model, "--max-tokens", 6]
    assert run("offline_texts.py", prompts, answers, *flags).startswith("2 prompts, 12 tokens, ")
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["One", "Two, three"]
    assert [record["text"] for record in records] == [
        generate(server, record["prompt"], 6) for record in records
    ]


def test_speculative_decoding(model: Path):
    flags = ["--model", model, "--max-tokens", 24, "--dtype", "float32"]
    plain, drafted, same = run("speculative_decoding.py", *flags).splitlines()
    assert plain.startswith("0 draft tokens: ")
    assert drafted.startswith("6 draft tokens: ")
    assert same == "same text"


def test_open_webui_asks_for_routes_that_exist(server: RealServer):
    """It lists models, and sends a stream with `stream_options`; fields of its own are left out."""
    (service,) = yaml.safe_load((EXAMPLES / "open_webui" / "compose.yaml").read_text())[
        "services"
    ].values()
    base = service["environment"]["OPENAI_API_BASE_URL"].removeprefix(
        "http://host.docker.internal:8000"
    )
    names = [
        found["id"] for found in httpx.get(f"http://{server.http}{base}/models").json()["data"]
    ]
    assert names[0] == MODEL
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx.post(f"http://{server.http}{base}/chat/completions", json=body, timeout=60).text
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    assert text == chat_text(server, "Hi", 5)
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert answer.rstrip().endswith("data: [DONE]")


def test_the_ray_file_has_arguments_that_exist():
    (application,) = yaml.safe_load((EXAMPLES / "ray_serve.yaml").read_text())["applications"]
    assert application["import_path"] == "slipstream.ray.serve:app"
    source = ast.parse((ROOT / "slipstream" / "ray" / "serve.py").read_text())
    (arguments,) = (node for node in source.body if getattr(node, "name", "") == "Arguments")
    known = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)}
    assert application["args"].keys() <= known


@pytest.mark.clients
def test_langchain_chain(server: RealServer):
    python = environment("example-langchain", ["langchain-openai"])
    printed = run("langchain_chain.py", "boat", "--url", f"http://{server.http}", python=python)
    assert printed == chat_text(server, "Write one sentence about a boat.", 48) + "\n"


def test_every_example_is_listed_and_tested():
    listed = re.findall(r"^\| \[([\w./]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    found = {
        path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")
    }
    assert {name.rstrip("/") for name in listed} == found
    source = Path(__file__).read_text() + (Path(__file__).parent / "test_bentoml.py").read_text()
    for name in found:
        assert f'"{name}' in source or f'/ "{name}' in source, name
