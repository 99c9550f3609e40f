"""A GGUF file as a source: its metadata as a config, its tensors as stored or dequantised."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from slipstream.kernels.blocks import BLOCK_FORMATS
from slipstream.model.families import phi3
from slipstream.model.families.family import Recipe, UnsupportedModel, WeightMap, collapse_layer
from slipstream.model.families.gpt import gptj
from slipstream.model.families.registry import FAMILIES, name_list
from slipstream.model.spec import ModelSpec, RopeScaling
from slipstream.weights.engine_config import GenerationDefaults, PoolingDefaults
from slipstream.weights.parameters import PLAIN_FORMS, Shape
from slipstream.weights.sources.gguf_file import GgufFile, read_gguf
from slipstream.weights.sources.source import SourceError, StoredMatrices, row_blocks

if TYPE_CHECKING:
    import torch

_WEIGHTS = WeightMap(
    layer_prefix="blk.{layer}.",
    layers={
        "input_layernorm": ("attn_norm",),
        "attention.qkv": ("attn_q", "attn_k", "attn_v"),
        "attention.q_layernorm": ("attn_q_norm",),
        "attention.k_layernorm": ("attn_k_norm",),
        "attention.dense": ("attn_output",),
        "post_layernorm": ("ffn_norm",),
        "mlp.fc": ("ffn_gate",),
        "mlp.gate": ("ffn_up",),
        "mlp.proj": ("ffn_down",),
    },
    outer={
        "transformer.vocab_embedding": "token_embd",
        "transformer.position_embedding": "position_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    },
    # these tensors become a part of the spec
    ignored=(r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight"),
)
# llama.cpp's converter has already transposed GPT-2's matrices, and put the rows of NeoX's and
# Falcon's q, k and v in this order.
_GPT2_WEIGHTS = replace(
    _WEIGHTS, layers={**_WEIGHTS.layers, "attention.qkv": ("attn_qkv",), "mlp.fc": ("ffn_up",)}
)
_PHI3_WEIGHTS = replace(
    _WEIGHTS,
    rows=phi3.WEIGHTS.rows,
    layers={
        **_WEIGHTS.layers,
        "attention.qkv": ("attn_qkv",),
        "mlp.fc": ("ffn_up",),
        "mlp.gate": ("ffn_up",),
    },
)
_GPTJ_WEIGHTS = replace(
    _WEIGHTS, rows=gptj.WEIGHTS.rows, layers={**_WEIGHTS.layers, "mlp.fc": ("ffn_up",)}
)
# Falcon with two norms: attn_norm_2 is the norm of attention.
_FALCON_WEIGHTS = replace(
    _GPT2_WEIGHTS,
    layers={
        **_GPT2_WEIGHTS.layers,
        "input_layernorm": ("attn_norm_2",),
        "post_layernorm": ("attn_norm",),
    },
)
_GEMMA2_WEIGHTS = replace(
    _WEIGHTS,
    layers={
        **_WEIGHTS.layers,
        "post_layernorm": ("post_attention_norm",),
        "pre_feedforward_layernorm": ("ffn_norm",),
        "post_feedforward_layernorm": ("post_ffw_norm",),
    },
)
_EXPERT_WEIGHTS = replace(
    _WEIGHTS,
    layers={
        **{
            module: sources
            for module, sources in _WEIGHTS.layers.items()
            if not module.startswith("mlp.")
        },
        "mlp.router": ("ffn_gate_inp",),
        "mlp.experts.gate_up": ("ffn_gate_exps.{expert}", "ffn_up_exps.{expert}"),
        "mlp.experts.proj": ("ffn_down_exps.{expert}",),
    },
)
_ARCHITECTURES = {
    "llama": _WEIGHTS,
    "qwen2": _WEIGHTS,
    "qwen3": _WEIGHTS,
    "gpt2": _GPT2_WEIGHTS,
    "gemma": _WEIGHTS,
    "gemma2": _GEMMA2_WEIGHTS,
    "gemma3": _GEMMA2_WEIGHTS,
    "phi3": _PHI3_WEIGHTS,
    "qwen3moe": _EXPERT_WEIGHTS,
    "falcon": _GPT2_WEIGHTS,
    "gptneox": _GPT2_WEIGHTS,
    "gptj": _GPTJ_WEIGHTS,
}
_FAMILY_NAMES = {"gptneox": "gpt_neox"}  # architecture → family, where the names differ
_SECOND_NORM = "blk.0.attn_norm_2.weight"
# Architecture → family of files with a mixture of experts.
_WITH_EXPERTS = {"llama": "mixtral", "qwen3moe": "qwen3_moe"}
# Layers of the largest models, which scale attention scores by hidden / heads. Files do not
# record that.
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
_POOLING_KINDS = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's numbers
_PLAIN = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}


class GgufSource:
    expanded = ""  # the build says which blocks it keeps

    def __init__(self, path: Path, label: str) -> None:
        self.path = path
        self.label = label
        self.file = read_gguf(path).split_experts()
        self.architecture = _architecture(self.file)
        self._map = _ARCHITECTURES[self.architecture]
        if _experts(self.file) or _SECOND_NORM in self.file.tensors:
            self._map = _EXPERT_WEIGHTS if _experts(self.file) else _FALCON_WEIGHTS
        try:
            self.spec = read_spec(self.file, self.architecture)
        except (SourceError, UnsupportedModel):
            raise
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise SourceError(
                f"{path}: damaged: its metadata contradicts itself: {error}"
            ) from error
        self.generation = _generation(self.file.metadata)
        kind = self.file.metadata.get(f"{self.architecture}.pooling_type")
        self.pooling = PoolingDefaults(_POOLING_KINDS[kind]) if kind in _POOLING_KINDS else None

    @property
    def dtype(self) -> str | None:
        kinds = {tensor.kind for tensor in self.file.tensors.values()}
        if (
            kinds <= {GGMLQuantizationType.F32, GGMLQuantizationType.F16}
            and GGMLQuantizationType.F16 in kinds
        ):
            return "float16"
        return "bfloat16" if GGMLQuantizationType.BF16 in kinds else None

    def shapes(self) -> Mapping[str, Shape]:
        return {
            name: tensor.shape
            for name, tensor in self.file.tensors.items()
            if not self._map.ignores(name)
        }

    def recipe(self, parameter: str) -> Recipe:
        return self._map.recipe(parameter, self.spec)

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        import torch

        tensor = self.file.tensors[name]
        if len(tensor.shape) == 1:
            yield torch.from_numpy(
                self._undo_rope_permutation(name, self._values(name, 0, 1).reshape(-1))
            )
            return
        rows = tensor.shape[0]
        # a block holds whole heads, because the rows of a head may have to be reordered
        for start, stop in row_blocks(rows, 4 * tensor.shape[-1], self.spec.head_size):
            yield torch.from_numpy(
                self._undo_rope_permutation(name, self._values(name, start, stop))
            )

    @property
    def stored(self) -> StoredMatrices | None:
        return self if BLOCK_FORMATS.keys() & self.forms().values() else None

    def forms(self) -> dict[str, str]:
        return {
            name: tensor.kind.name
            for name, tensor in self.file.tensors.items()
            if len(tensor.shape) == 2
            and (tensor.kind.name in BLOCK_FORMATS or tensor.kind.name in PLAIN_FORMS)
        }

    def read_stored(self, name: str) -> np.ndarray:
        raw = self.file.read_raw_rows(name, 0, self.file.tensors[name].shape[0])
        return self._undo_rope_permutation(name, raw)

    def tokenizer_files(self) -> dict[str, bytes]:
        from slipstream.weights.sources.gguf_tokenizer import tokenizer_files

        return tokenizer_files(self.file.metadata, self.generation, self.spec.max_positions)

    def fingerprint(self) -> str:
        """Return a hash of the header and of the size and modification time of the file.

        The header holds the config and the tokenizer.
        """
        first = min((tensor.offset for tensor in self.file.tensors.values()), default=0)
        digest = hashlib.sha256(self.file.data[:first])
        stat = self.file.path.stat()
        digest.update(f"{stat.st_size}:{stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _values(self, name: str, start: int, stop: int) -> np.ndarray:
        raw = self.file.read_raw_rows(name, start, stop)
        kind = self.file.tensors[name].kind
        if kind in _PLAIN:
            # the mapping is read-only, and torch needs writable memory
            return raw.view(_PLAIN[kind]).copy()
        if kind.name in BLOCK_FORMATS:
            return BLOCK_FORMATS[kind.name].expand(raw)
        try:
            return quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise SourceError(
                f"{self.label}: tensor {name} has type {kind.name}, which is not supported"
            ) from error

    def _undo_rope_permutation(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the rows of q and k with the two halves of each head one after the other.

        Llama files interleave the halves.
        """
        if self.architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
            return rows
        half = self.spec.head_size // 2
        pairs = rows.reshape(-1, half, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def read_spec(file: GgufFile, architecture: str) -> ModelSpec:
    """Return the spec of a file.

    The metadata is written as a Hugging Face config, which the family reads. The names of the
    tensors add the rest.
    """
    name = _FAMILY_NAMES.get(architecture, architecture)
    if _experts(file):
        name = _WITH_EXPERTS[architecture]
    family = next(family for family in FAMILIES if family.name == name)
    spec = family.spec(_CONFIGS.get(architecture, _decoder_config)(file, architecture))
    names = file.tensors
    spec = replace(
        spec,
        tied_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_qkv.bias" in names or "blk.0.attn_q.bias" in names,
        o_proj_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        head_bias="output.bias" in names,
        norm_offset=0.0,  # included in Gemma's weights by the converter
    )
    if "rope_freqs.weight" in names:
        # Llama 3.1's scaling as a list of divisors. Longrope with one list for all lengths is
        # equivalent.
        divisors = tuple(file.read_floats("rope_freqs.weight").tolist())
        scaling = RopeScaling(
            "longrope",
            1.0,
            spec.max_positions,
            attention_factor=1.0,
            short_factors=divisors,
            long_factors=divisors,
        )
        spec = replace(spec, rope_scaling=scaling)
    return spec


def _architecture(file: GgufFile) -> str:
    architecture = str(file.metadata.get("general.architecture", "(none named)"))
    if int(file.metadata.get("split.count", 1)) > 1:
        raise SourceError(
            f"{file.path}: one of several parts; join them with llama-gguf-split --merge first"
        )
    if architecture not in _ARCHITECTURES:
        unknown = {collapse_layer(name) for name in file.tensors if not _is_known(name)}
        names = f"; tensors that match no known name: {name_list(unknown)}" if unknown else ""
        raise UnsupportedModel(
            f"GGUF architecture {architecture} is not supported; "
            f"supported: {', '.join(_ARCHITECTURES)}{names}"
        )
    if _experts(file) and architecture not in _WITH_EXPERTS:
        raise UnsupportedModel(
            f"GGUF architecture {architecture} with a mixture of experts is not supported"
        )
    if "token_embd.weight" not in file.tensors:
        raise SourceError(f"{file.path}: has no tensor token_embd.weight: it is not a whole model")
    return architecture


def _is_known(tensor: str) -> bool:
    return any(weights.knows(tensor) for weights in _ARCHITECTURES.values())


def _experts(file: GgufFile) -> int:
    """Return the number of experts, or 0 for a file without a mixture of experts."""
    return int(file.metadata.get(f"{file.metadata.get('general.architecture')}.expert_count", 0))


def _decoder_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    value = _Values(file, architecture)
    heads = value.same("attention.head_count")
    hidden = value.required("embedding_length")
    head_size = value.get("attention.key_length") or hidden // heads
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": value.required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value.same("attention.head_count_kv") or heads,
        "head_dim": head_size,
        "intermediate_size": value.same("feed_forward_length"),
        "max_position_embeddings": value.required("context_length"),
        "rms_norm_eps": value.required("attention.layer_norm_rms_epsilon"),
        "rope_theta": value.get("rope.freq_base") or 10000.0,
        "partial_rotary_factor": (value.get("rope.dimension_count") or head_size) / head_size,
        "rope_scaling": _rope_scaling(file, value),
        **_own_options(value, architecture, hidden // heads, head_size),
    }


def _own_options(
    value: _Values, architecture: str, head_share: int, head_size: int
) -> dict[str, Any]:
    """Return the options of some architectures. Options that the file lacks keep their defaults."""
    largest = value.get("block_count") == _LARGEST_GEMMA_LAYERS.get(architecture)
    options = {
        "sliding_window": value.get("attention.sliding_window"),
        "attn_logit_softcapping": value.get("attn_logit_softcapping"),
        "final_logit_softcapping": value.get("final_logit_softcapping"),
        "query_pre_attn_scalar": head_share if largest else head_size,
        "rope_local_base_freq": value.get("rope.freq_base_swa"),
        "original_max_position_embeddings": value.get("rope.scaling.original_context_length"),
    }
    if architecture in _WITH_EXPERTS:
        return {
            "num_local_experts": value.get("expert_count"),
            "num_experts_per_tok": value.get("expert_used_count"),
            "moe_intermediate_size": value.get("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    if architecture not in ("gemma", "gemma2", "gemma3", "phi3"):
        return {}
    # a sliding window of 0 means no window
    return {key: given for key, given in options.items() if given}


def _gpt2_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Return the config of GPT-2 or GPT-J. GPT-2 has no RoPE and ignores its options."""
    value = _Values(file, architecture)
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "n_embd": value.required("embedding_length"),
        "n_layer": value.required("block_count"),
        "n_head": value.required("attention.head_count"),
        "n_inner": value.required("feed_forward_length"),
        "n_positions": value.required("context_length"),
        "layer_norm_epsilon": value.required("attention.layer_norm_epsilon"),
        "rotary_dim": value.get("rope.dimension_count"),
        "rope_theta": value.get("rope.freq_base"),
    }


def _layer_norm_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Return the config of Falcon or GPT-NeoX, with the option names of both."""
    value = _Values(file, architecture)
    heads = value.required("attention.head_count")
    hidden = value.required("embedding_length")
    joined = file.tensors.get("blk.0.attn_qkv.weight")
    if joined is None:
        raise SourceError(
            f"{file.path}: has no tensor blk.0.attn_qkv.weight: it is not a whole model"
        )
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": value.required("block_count"),
        "num_attention_heads": heads,
        "intermediate_size": value.required("feed_forward_length"),
        "max_position_embeddings": value.required("context_length"),
        "layer_norm_eps": value.required("attention.layer_norm_epsilon"),
        "rope_theta": value.get("rope.freq_base"),
        "partial_rotary_factor": (value.get("rope.dimension_count") or hidden // heads)
        / (hidden // heads),
        "use_parallel_residual": value.get("use_parallel_residual") is not False,
        # Falcon's options; older files have a wrong number of KV heads, so it is taken from the
        # tensor
        "layer_norm_epsilon": value.required("attention.layer_norm_epsilon"),
        "ffn_hidden_size": value.required("feed_forward_length"),
        "new_decoder_architecture": True,
        "num_kv_heads": (joined.shape[0] // (hidden // heads) - heads) // 2,
        "num_ln_in_parallel_attn": 2 if _SECOND_NORM in file.tensors else 1,
    }


_CONFIGS = {
    "gpt2": _gpt2_config,
    "gptj": _gpt2_config,
    "falcon": _layer_norm_config,
    "gptneox": _layer_norm_config,
}


def _rope_scaling(file: GgufFile, value: _Values) -> dict[str, Any] | None:
    kind = value.get("rope.scaling.type")
    linear = value.get("rope.scale_linear")  # key of old files
    if kind in (None, "none") and "rope_factors_long.weight" in file.tensors:
        kind = "longrope"  # files with longrope may have the factors only
    if kind in (None, "none"):
        return {"rope_type": "linear", "factor": linear} if linear and linear != 1.0 else None
    scaling = {
        "rope_type": kind,
        "factor": value.get("rope.scaling.factor"),
        "original_max_position_embeddings": value.get("rope.scaling.original_context_length"),
        "attention_factor": value.get("rope.scaling.attn_factor") if kind == "longrope" else None,
    }
    for length in ("short", "long"):
        name = f"rope_factors_{length}.weight"
        if name in file.tensors:
            scaling[f"{length}_factor"] = file.read_floats(name).tolist()
    return scaling


class _Values:
    """The metadata of one architecture, whose keys begin with the architecture's name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._prefix = f"{architecture}."

    def get(self, key: str) -> Any:
        return self._file.metadata.get(self._prefix + key)

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise SourceError(f"{self._file.path}: its metadata has no {self._prefix + key}")
        return value

    def same(self, key: str) -> Any:
        """Return a value that may be given per layer. It must be the same for all layers."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return value
        if len(set(value.tolist())) != 1:
            raise UnsupportedModel(
                f"GGUF with a {self._prefix + key} that differs between layers is not supported"
            )
        return value[0].item()


def _generation(metadata: dict[str, Any]) -> GenerationDefaults:
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    if ids[1] is None:  # older files lack this key, so the token is found by its name
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        ids += [tokens.index(name) for name in ("<|eot_id|>", "<|im_end|>") if name in tokens]
    end_ids = tuple(dict.fromkeys(int(number) for number in ids if number is not None))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    pad = metadata.get("tokenizer.ggml.padding_token_id")
    return GenerationDefaults(end_ids, bos, pad)
