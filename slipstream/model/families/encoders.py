"""Encoders: BERT, RoBERTa and XLM-RoBERTa, for embeddings and scores. Attention goes in both
directions, norms follow the residual additions, positions are learned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.model.families.family import Family, UnsupportedModel, WeightMap
from slipstream.model.families.hf_config import decoder_spec, refuse_unusual
from slipstream.model.spec import ModelSpec

_SCORES = "ForSequenceClassification"
_RESERVED_POSITIONS = 2  # of RoBERTa: for padding


def _weights(prefix: str) -> WeightMap:
    """Return the map of checkpoints whose names begin with this."""
    return WeightMap(
        layer_prefix=f"{prefix}encoder.layer.{{layer}}.",
        layers={
            "attention.qkv": (
                "attention.self.query",
                "attention.self.key",
                "attention.self.value",
            ),
            "attention.dense": ("attention.output.dense",),
            "input_layernorm": ("attention.output.LayerNorm",),
            "mlp.fc": ("intermediate.dense",),
            "mlp.proj": ("output.dense",),
            "post_layernorm": ("output.LayerNorm",),
        },
        outer={
            "transformer.vocab_embedding": f"{prefix}embeddings.word_embeddings",
            "transformer.position_embedding": f"{prefix}embeddings.position_embeddings",
            "transformer.type_embedding": f"{prefix}embeddings.token_type_embeddings",
            "transformer.ln_embed": f"{prefix}embeddings.LayerNorm",
            "lm_head": "lm_head",  # which no checkpoint of these has
            "score": "score",
            "score_dense": f"{prefix}score_dense",
        },
        # the first layer of heads for other tasks, and positions saved as a buffer
        ignored=(rf"({prefix})?(pooler\..*|embeddings\.position_ids)",),
        optional_prefix=prefix,
        # names of the first years
        aliases=((".gamma", ".weight"), (".beta", ".bias")),
    )


BERT_WEIGHTS = _weights("bert.")
ROBERTA_WEIGHTS = replace(
    _weights("roberta."),
    rows={
        "transformer.position_embedding": lambda spec: range(
            _RESERVED_POSITIONS, spec.max_positions + _RESERVED_POSITIONS
        )
    },
    aliases=(("classifier.out_proj.", "score."), ("classifier.dense.", "score_dense.")),
)


def bert_spec(config: dict[str, Any]) -> ModelSpec:
    if any(name.endswith(_SCORES) for name in config.get("architectures") or []):
        raise UnsupportedModel(
            "BertForSequenceClassification is not supported: it tells the two texts of a pair "
            "apart by token types; use a model of XLMRobertaForSequenceClassification"
        )
    return _spec("BertModel", config)


def roberta_spec(config: dict[str, Any]) -> ModelSpec:
    refuse_unusual("RoBERTa", config, {"pad_token_id": 1})
    positions = config.get("max_position_embeddings") or 514
    scores = any(name.endswith(_SCORES) for name in config.get("architectures") or [])
    config = {**config, "max_position_embeddings": positions - _RESERVED_POSITIONS}
    return replace(_spec("RobertaModel", config), score_dense=scores)


def _spec(architecture: str, config: dict[str, Any]) -> ModelSpec:
    refuse_unusual(
        architecture,
        config,
        {
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "add_cross_attention": False,
        },
    )
    config = {
        "hidden_act": "gelu",
        **config,
        "tie_word_embeddings": True,
        "rms_norm_eps": config.get("layer_norm_eps") or 1e-12,
    }
    return decoder_spec(
        architecture,
        config,
        default_positions=512,
        gated_mlp=False,
        norm="layer",
        position="learned",
        qkv_bias=True,
        o_proj_bias=True,
        mlp_bias=True,
        norms_after=True,
        final_norm=False,
        embedding_norm=True,
        causal=False,
        token_types=int(config.get("type_vocab_size") or 0),
    )


FAMILIES = (
    Family("bert", ("BertModel",), bert_spec, BERT_WEIGHTS, ("bert",)),
    Family(
        "roberta",
        ("RobertaModel", "XLMRobertaModel"),
        roberta_spec,
        ROBERTA_WEIGHTS,
        ("roberta", "xlm-roberta"),
    ),
)
