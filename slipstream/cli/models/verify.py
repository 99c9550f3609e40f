"""`slipstream verify`: compare an engine's tokens and logits with those of its original model."""

from __future__ import annotations

import importlib
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.engine_flags import add_weight_only
from slipstream.cli.models.import_model import build_cached
from slipstream.cli.models.served_model import find_model_to_serve
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.engine_config import EngineConfig, EngineFolderError, read_engine_config
from slipstream.weights.sources.gguf_source import GgufSource
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.open_source import open_source

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


class Reference(NamedTuple):
    """The files that transformers loads the original model from."""

    folder: Path
    gguf_file: str | None = None
    # a checkpoint that is quantised: the reference is the model that it stands for
    quantised: HuggingFaceFolder | None = None

    @property
    def options(self) -> dict[str, str]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def create_parser() -> Parser:
    parser = Parser(
        "slipstream verify",
        "Compare the tokens and logits of an engine with those of its original model, computed by "
        "transformers in float32.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Engine folder, imported model, or whatever `slipstream import` takes: a known name, "
        "a folder, a GGUF file, or ORG/NAME on the hub. The engine is built if the cache lacks it.",
    )
    parser.add_argument(
        "--against",
        metavar="SOURCE",
        help="Original model: a Hugging Face folder, a GGUF file, a known name, or ORG/NAME on the "
        "hub (default: the source that the engine was built from).",
    )
    add_weight_only(parser)
    return parser


def run(given: Namespace) -> int:
    config = _engine(given.model, given.weight_only)
    source = given.against or config.source
    if not source:
        raise CommandError(f"{config.path} does not record its source: give --against SOURCE")
    against = _reference(source)
    transformers = _transformers()
    reference = transformers.AutoTokenizer.from_pretrained(str(against.folder), **against.options)
    sequences = [reference(text).input_ids for text in TEXTS]
    if against.quantised is not None:
        print(f"reference: the matrices that the {against.quantised.expanded} weights stand for")
    same_tokens = _compare_tokens(Tokenizer.load(config.path), sequences)
    if not same_tokens and against.gguf_file is not None:
        # transformers makes a tokenizer of its own from a GGUF file, without its rule for digits
        print("tokenisation: the differences do not count, as the reference is not the model's own")
        same_tokens = True
    same_logits = _compare_logits(config, against, transformers, sequences)
    return 0 if same_tokens and same_logits else 1


def _engine(text: str, weight_only: str | None) -> EngineConfig:
    """Return the engine that a text names. Builds it if the cache lacks it."""
    path = Path(text)
    if path.is_dir() and (engine := _engine_folder(path)) is not None and weight_only is None:
        return engine
    model = find_model_to_serve(text, weight_only)
    return read_engine_config(model.engine or build_cached(model.source, weight_only=weight_only))


def _engine_folder(path: Path) -> EngineConfig | None:
    try:
        return read_engine_config(path)
    except EngineFolderError:
        return None


def _reference(text: str) -> Reference:
    source = open_source(text)
    if isinstance(source, HuggingFaceFolder):
        return Reference(source.folder, quantised=source if source.expanded else None)
    if isinstance(source, GgufSource):
        return Reference(source.path.parent, source.path.name)
    raise CommandError(
        f"--against {text}: a checkpoint has no model of transformers; give the Hugging Face "
        "folder or the GGUF file that it was converted from"
    )


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
    config: EngineConfig, against: Reference, transformers: Any, sequences: list[list[int]]
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


def _load_reference(transformers: Any, against: Reference) -> Any:
    """Return the original model in float32. transformers reads few quantised ones on a CPU, and
    each with another library: their weights are expanded first.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="slipstream-verify-") as expanded:
        folder = against.folder
        if against.quantised is not None:
            against.quantised.write_expanded(Path(expanded))
            folder = Path(expanded)
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, **against.options
        ).eval()


def _trace_reference(
    transformers: Any, against: Reference, sequences: list[list[int]]
) -> list[Any]:
    import torch

    from slipstream.weights.verify import Trace

    model = _load_reference(transformers, against)
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
