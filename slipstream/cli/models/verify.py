"""`slipstream verify`: compare an engine's tokens and logits with those of its original model."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

from slipstream.cli.arguments import CommandError, Parser
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.engine_config import EngineConfig, read_engine_config

# Plain text, a list, code, accents, other scripts and an emoji: tokenizers treat them differently.
TEXTS = (
    "The harbour was quiet that morning, and the gulls had the quay to themselves.",
    "1. flour  2. water\n3. salt\n\nMix, wait, and bake at 230 °C for 35 minutes.",
    "def area(radius):\n    return 3.14159 * radius ** 2  # not exact\n",
    "Où est la bibliothèque? Straße, mañana, þorn.",
    "東京は夜の七時。 Привет, мир! مرحبا 👋",
)
# bits of a weight-only engine (0: not quantised): lowest accepted share of equal top-1 tokens
_LEAST_AGREEMENT = {0: 0.99, 8: 0.97, 4: 0.85}


def create_parser() -> Parser:
    parser = Parser("slipstream verify", "Compare an engine with the model it was built from.")
    parser.add_argument("engine", type=Path, help="Folder of the engine.")
    parser.add_argument(
        "--against",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="Hugging Face folder that the engine was built from.",
    )
    return parser


def run(given: Namespace) -> int:
    config = read_engine_config(given.engine)
    if not (given.against / "config.json").is_file():
        raise CommandError(
            f"--against {given.against}: not a Hugging Face folder: there is no config.json in it"
        )
    transformers = _transformers()
    reference = transformers.AutoTokenizer.from_pretrained(str(given.against))
    sequences = [reference(text).input_ids for text in TEXTS]
    same_tokens = _compare_tokens(Tokenizer.load(config.path), sequences)
    same_logits = _compare_logits(config, given.against, transformers, sequences)
    return 0 if same_tokens and same_logits else 1


def _compare_tokens(tokenizer: Tokenizer, expected: list[list[int]]) -> bool:
    equal = 0
    for text, tokens in zip(TEXTS, expected, strict=True):
        found = tokenizer.encode(text)
        equal += found == tokens
        if found != tokens:
            print(f"tokenisation differs: {text!r}: {found} here, {tokens} there")
    verdict = "equal" if equal == len(TEXTS) else "not equal"
    print(f"tokenisation: {verdict} ({equal} of {len(TEXTS)} texts)")
    return equal == len(TEXTS)


def _transformers() -> Any:
    """Import transformers by name: the package does not depend on it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CommandError(
            "verify compares with transformers, which is not installed; "
            "install it with: pip install transformers"
        ) from error


def _compare_logits(
    config: EngineConfig, against: Path, transformers: Any, sequences: list[list[int]]
) -> bool:
    from slipstream.weights.verify import compare, trace_engine

    found = compare(
        trace_engine(config.path, sequences), _trace_reference(transformers, against, sequences)
    )
    print(f"top-1 agreement: {found.agreement:.2%} of {found.tokens} positions")
    print(f"largest logit difference: {found.largest_difference:.6f}")
    if found.first_diverging_layer is None:
        print("first layer that diverges: none")
    else:
        layer = found.first_diverging_layer
        print(f"first layer that diverges: {'the embedding' if layer < 0 else layer}")
    return found.agreement >= _LEAST_AGREEMENT[config.quantisation.bits]


def _trace_reference(transformers: Any, folder: Path, sequences: list[list[int]]) -> list[Any]:
    import torch

    from slipstream.weights.verify import Trace

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32
    ).eval()
    seen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("input_layernorm", "ln_1"):
            module.register_forward_hook(
                lambda _module, _inputs, output: seen.append(output[0].clone())
            )
    traces = []
    with torch.inference_mode():
        for sequence in sequences:
            seen.clear()
            logits = model(torch.tensor([sequence])).logits[0]
            traces.append(Trace(list(seen), logits))
    return traces
