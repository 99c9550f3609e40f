"""`slipstream verify ENGINE --against HF_DIR`: does the engine say what the model says?"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.cli.arguments import CommandError, Parser
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.engine_config import EngineConfig, read_engine_config

# Plain text, a list, code, accents, other scripts, an emoji: what tokenizers treat differently.
TEXTS = (
    "The harbour was quiet that morning, and the gulls had the quay to themselves.",
    "1. flour  2. water\n3. salt\n\nMix, wait, and bake at 230 °C for 35 minutes.",
    "def area(radius):\n    return 3.14159 * radius ** 2  # not exact\n",
    "Où est la bibliothèque? Straße, mañana, þorn.",
    "東京は夜の七時。 Привет, мир! مرحبا 👋",
)
_LEAST_AGREEMENT = {0: 0.99, 8: 0.97, 4: 0.85}  # by the bits of a weight-only engine


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "slipstream verify", description="Compare an engine with the model it was made from."
    )
    parser.add_argument("engine", type=Path, help="The engine's folder.")
    parser.add_argument(
        "--against", type=Path, required=True, help="The Hugging Face folder it was made from."
    )
    given = parser.parse(arguments)
    config = read_engine_config(given.engine)
    if not (given.against / "config.json").is_file():
        raise CommandError(
            f"--against {given.against}: not a Hugging Face folder: there is no config.json in it"
        )
    transformers = _transformers()
    tokenizer = Tokenizer.load(config.path)
    reference = transformers.AutoTokenizer.from_pretrained(str(given.against))
    unequal = [text for text in TEXTS if tokenizer.encode(text) != reference(text).input_ids]
    for text in unequal:
        print(
            f"tokenisation differs: {text!r}: {tokenizer.encode(text)} here, {reference(text).input_ids} there"
        )
    verdict = "not equal" if unequal else "equal"
    print(f"tokenisation: {verdict} ({len(TEXTS) - len(unequal)} of {len(TEXTS)} texts)")
    good = _compare_numbers(
        config, given.against, transformers, [reference(text).input_ids for text in TEXTS]
    )
    return 0 if good and not unequal else 1


def _transformers() -> Any:
    """Loaded by name: the package itself never needs it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CommandError(
            "verify compares with transformers, which is not installed; "
            "install it with: pip install transformers"
        ) from error


def _compare_numbers(
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
