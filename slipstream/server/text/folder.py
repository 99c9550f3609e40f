"""The tokenizer's files of a model folder, read into plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The names under which Hugging Face files give a special token; chat templates see them as
# variables.
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerError(ValueError):
    """The tokenizer's files, or the text or tokens to convert, are invalid."""


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched as a whole before the text is split.

    `strips_left`, `strips_right`: the token includes the space on that side.
    """

    content: str
    special: bool
    strips_left: bool = False
    strips_right: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class TokenizerFolder:
    path: Path
    config: dict[str, Any]  # tokenizer_config.json
    # bos_token, eos_token, ... and the model's own, such as image_token
    named_tokens: dict[str, AddedToken]
    extra_special_tokens: tuple[AddedToken, ...]
    added_tokens: dict[int, AddedToken]  # by id; tokens without an id are left out
    chat_templates: dict[str, str]  # by name; "default" is the usual one
    end_ids: tuple[int, ...]  # end ids of the generation config, in its order
    model_vocab_size: int  # rows of the model's output; 0: unknown

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def token_text(self, name: str) -> str | None:
        token = self.named_tokens.get(name)
        return token.content if token else None

    @property
    def special_tokens(self) -> list[AddedToken]:
        return [*self.named_tokens.values(), *self.extra_special_tokens]


def read_tokenizer_folder(path: Path) -> TokenizerFolder:
    if not path.is_dir():
        raise TokenizerError(f"{path} is not a folder with a tokenizer")
    config = _read_json(path / "tokenizer_config.json")
    special_map = _read_json(path / "special_tokens_map.json")
    named = _named_tokens(config, special_map)
    extra = _extra_special_tokens(config, special_map)
    specials = {token.content for token in (*named.values(), *extra)}
    model_config = _read_json(path / "config.json")
    return TokenizerFolder(
        path=path,
        config=config,
        named_tokens=named,
        extra_special_tokens=extra,
        added_tokens=_added_tokens(config, _read_json(path / "added_tokens.json"), specials),
        chat_templates=_chat_templates(path, config),
        end_ids=_end_ids(_read_json(path / "generation_config.json"), model_config),
        model_vocab_size=_model_vocab_size(model_config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"{path} is not valid JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _token(value: str | dict[str, Any], special: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TokenizerError(f"a token must be a text or an object with 'content', not {value!r}")
    return AddedToken(
        content=value["content"],
        special=bool(value.get("special", special)) or special,
        strips_left=bool(value.get("lstrip", False)),
        strips_right=bool(value.get("rstrip", False)),
        normalized=bool(value.get("normalized", False)),
        single_word=bool(value.get("single_word", False)),
    )


def _named_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, AddedToken]:
    values = {name: config.get(name) or special_map.get(name) for name in NAMED_TOKENS}
    for source in (special_map, config):
        values.update(
            {
                k: v
                for k, v in source.items()
                if k.endswith("_token") and k not in values and isinstance(v, str)
            }
        )
        extra = source.get("extra_special_tokens")
        values.update(extra if isinstance(extra, dict) else {})
    return {name: _token(value, special=True) for name, value in values.items() if value}


def _extra_special_tokens(
    config: dict[str, Any], special_map: dict[str, Any]
) -> tuple[AddedToken, ...]:
    found: dict[str, AddedToken] = {}
    for source in (config, special_map):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            values = source.get(key) or []
            for value in values if isinstance(values, list) else []:
                token = _token(value, special=True)
                found.setdefault(token.content, token)
    return tuple(found.values())


def _added_tokens(
    config: dict[str, Any], added_file: dict[str, Any], specials: set[str]
) -> dict[int, AddedToken]:
    """Return the added tokens by id: of the configuration, or of the older added_tokens.json."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        return {int(token_id): _token(value, special=False) for token_id, value in decoder.items()}
    return {
        token_id: AddedToken(
            content, special=content in specials, normalized=content not in specials
        )
        for content, token_id in added_file.items()
    }


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates. As in transformers, files override the configuration."""
    files = {"default": path / "chat_template.jinja"}
    files |= {
        file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))
    }
    templates = {
        name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()
    }
    if templates:
        return templates
    value = _read_json(path / "chat_template.json").get("chat_template") or config.get(
        "chat_template"
    )
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {"default": value} if value else {}


def _end_ids(generation_config: dict[str, Any], model_config: dict[str, Any]) -> tuple[int, ...]:
    # an engine folder has them in its config.json
    engine_defaults = model_config.get("generation")
    candidates = (
        generation_config.get("eos_token_id"),
        engine_defaults.get("end_ids") if isinstance(engine_defaults, dict) else None,
        model_config.get("eos_token_id"),
    )
    for value in candidates:
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(value)
    return ()


def _model_vocab_size(model_config: dict[str, Any]) -> int:
    engine_model = model_config.get("pretrained_config")
    source = engine_model if isinstance(engine_model, dict) else model_config
    size = source.get("vocab_size")
    return size if isinstance(size, int) else 0
