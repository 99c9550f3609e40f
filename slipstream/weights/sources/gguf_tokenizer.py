"""Build a tokenizer.json from a GGUF file's metadata.

There are two kinds of vocabulary. "gpt2" is byte-level BPE: `tokenizer.ggml.pre` names the pattern
that splits the text first. "llama" is SentencePiece's BPE: its merges are derived from the scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from slipstream.weights.engine_config import GenerationDefaults
from slipstream.weights.sources.source import SourceError

# tokenizer.ggml.token_type
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5

_LETTERS_OR_NUMBERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = {
    "llama3": _LETTERS_OR_NUMBERS.format(numbers=r"\p{N}{1,3}"),
    "qwen2": _LETTERS_OR_NUMBERS.format(numbers=r"\p{N}"),
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# tokenizer.ggml.pre → how text is split: by a pattern above, "gpt2" (the pattern of ByteLevel),
# "digits" (every digit apart, then "gpt2"), or "falcon" (punctuation apart, then "gpt2", then
# numbers in groups of three digits).
_SPLITS = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "phi-2": "gpt2",
    "olmo": "gpt2",
    "jina-es": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "codeshell": "digits",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "falcon3": "llama3",
    "dbrx": "llama3",
    "smaug-bpe": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "tekken": "tekken",
    "falcon": "falcon",
}
# Splits whose words are looked up in the vocabulary before merges are applied.
_WHOLE_WORDS_FIRST = ("llama3", "tekken")


def tokenizer_files(
    metadata: dict[str, Any], generation: GenerationDefaults, positions: int
) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json of a file."""
    tokenizer = build_tokenizer(metadata)
    config = _tokenizer_config(metadata, positions)
    defaults = {
        "eos_token_id": list(generation.end_ids),
        "bos_token_id": generation.bos_id,
        "pad_token_id": generation.pad_id,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
        "generation_config.json": json.dumps(
            {k: v for k, v in defaults.items() if v is not None}, indent=2
        ).encode(),
    }


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise SourceError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens)")
    if kind not in ("gpt2", "llama"):
        raise SourceError(
            f"the GGUF file's tokenizer is of kind {kind!r}, which is not supported; "
            "supported: gpt2, llama; import the model's Hugging Face folder instead"
        )
    try:
        return _assemble(metadata, tokens, _byte_level if kind == "gpt2" else _sentence_piece)
    except SourceError:
        raise
    except Exception as error:
        # the tokenizers library raises no narrower class for lists that contradict each other
        raise SourceError(f"the GGUF file's tokenizer is damaged: {error}") from error


def _assemble(
    metadata: dict[str, Any], tokens: list[str], model: Callable[..., Tokenizer]
) -> Tokenizer:
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    tokenizer = model(metadata, tokens, types)
    _add_tokens(tokenizer, tokens, types)
    template = _template(metadata, tokens)
    if template is not None:
        tokenizer.post_processor = template
    return tokenizer


def adds_bos(metadata: dict[str, Any]) -> bool:
    return bool(
        metadata.get(
            "tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama"
        )
    )


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise SourceError(
            f"the GGUF file splits text in an unknown way (tokenizer.ggml.pre is {name!r}); "
            "import the model's Hugging Face folder instead"
        )
    split = _SPLITS[name]
    vocabulary = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    merges = [_split_merge(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(model)
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "digits":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if split == "falcon":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation(behavior="contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
            ]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERNS[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentence_piece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise SourceError(
            "the GGUF file's SentencePiece vocabulary has no scores (tokenizer.ggml.scores)"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = next((tokens[number] for number, kind in enumerate(types) if kind == _UNKNOWN), None)
    merges = derive_merges(vocabulary, [float(score) for score in scores], types)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalize: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    decode: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        normalize.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalize)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def derive_merges(
    vocabulary: dict[str, int], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Return every pair of tokens that forms a token, in the order in which SentencePiece merges.

    The pair with the highest score of its result is first.
    """
    found = []
    for token, number in vocabulary.items():
        if types[number] in (_UNKNOWN, _CONTROL, _UNUSED):
            continue
        pairs = [(token[:end], token[end:]) for end in range(1, len(token))]
        known = [
            (vocabulary[left], vocabulary[right])
            for left, right in pairs
            if left in vocabulary and right in vocabulary
        ]
        found += [(-scores[number], number, *pair) for pair in sorted(known)]
    texts = {number: token for token, number in vocabulary.items()}
    found.sort(key=lambda item: item[0])  # stable sort: equal scores keep the vocabulary's order
    return [(texts[left], texts[right]) for _, _, left, right in found]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add the tokens that are matched before the text is split.

    Control tokens are special: they are left out of decoded text.
    """
    special = [
        AddedToken(tokens[number], special=True, normalized=False)
        for number, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL)
    ]
    defined = [
        AddedToken(tokens[number], special=False, normalized=False)
        for number, kind in enumerate(types)
        if kind == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)


def _template(metadata: dict[str, Any], tokens: list[str]) -> processors.PostProcessor | None:
    """Return the template that adds BOS and EOS around the text, or None if it adds neither."""
    bos = metadata.get("tokenizer.ggml.bos_token_id") if adds_bos(metadata) else None
    eos = None
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = metadata.get("tokenizer.ggml.eos_token_id")
    if bos is None and eos is None:
        return None
    special: dict[str, int] = {}
    single = ["$A:0"]
    if bos is not None:
        special[tokens[bos]] = bos
        single.insert(0, f"{tokens[bos]}:0")
    if eos is not None:
        special[tokens[eos]] = eos
        single.append(f"{tokens[eos]}:0")
    pair = single + [piece.replace("$A", "$B")[:-1] + "1" for piece in single]
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=list(special.items())
    )


def _tokenizer_config(metadata: dict[str, Any], positions: int) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "add_bos_token": adds_bos(metadata),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
