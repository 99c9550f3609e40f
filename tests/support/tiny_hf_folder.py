"""Save small transformers models with a tokenizer, and generate text with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import config_of, random_model
from tokenizers import Tokenizer as TokenizerFile
from tokenizers import decoders, models, pre_tokenizers, processors

# newline, space and visible ASCII characters, in byte-level spelling
LETTERS = ["Ċ", "Ġ", *map(chr, range(33, 127))]
BEGIN = len(LETTERS)
END = len(LETTERS) + 1
VOCABULARY = len(LETTERS) + 2
LETTERS_COUNT = len(LETTERS)
POSITIONS = 512


def save_model(
    folder: Path, family: str = "llama", *, decided: bool = True, **options: Any
) -> Path:
    """Save a model. With `decided` sampling gives the greedy answer up to high temperatures."""
    sizes = (
        {"n_positions": POSITIONS} if family == "gpt2" else {"max_position_embeddings": POSITIONS}
    )
    # the end token is unlikely, so answers have the requested length
    options.setdefault("tie_word_embeddings", False)
    config = config_of(
        family, vocab_size=VOCABULARY, bos_token_id=BEGIN, eos_token_id=END, **{**sizes, **options}
    )
    model = decided_model(config) if decided else random_model(config)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def decided_model(config: Any) -> Any:
    """Return a model in which one next token is far more likely than the others.

    Rounding to 16 bits then does not change an answer. The layers still decide which token that
    is at many positions.
    """
    import torch

    model = random_model(config)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        embedding.mul_(6.0)
        followers = torch.randperm(LETTERS_COUNT)
        head = model.get_output_embeddings().weight
        head.zero_()  # the begin and end tokens are never the most likely
        head[followers] = embedding[:LETTERS_COUNT].detach().clone()
    return model


def save_tokenizer(folder: Path) -> None:
    tokenizer = TokenizerFile(
        models.BPE({letter: position for position, letter in enumerate(LETTERS)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def greedy_text(
    folder: Path, prompt: str, tokens: int, *, special: bool, dtype: str = "float16"
) -> str:
    """Return the continuation of a prompt by transformers, in float32 with weights of `dtype`."""
    import torch
    import transformers as hf

    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(
        {
            name: tensor.to(getattr(torch, dtype)).float() if tensor.is_floating_point() else tensor
            for name, tensor in model.state_dict().items()
        }
    )
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, add_special_tokens=special, return_tensors="pt").input_ids
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=END,
    )
    return tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
