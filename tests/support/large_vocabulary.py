"""A model of two small layers with a large vocabulary, a long context and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_models import config_of, random_model
from tokenizers import Tokenizer as TokenizerFile
from tokenizers import decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
VOCABULARY = 16384  # of the model; the tokenizer has fewer tokens
CONTEXT = 2048
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEXT = "some words of a long prompt "


def save_large_model(folder: Path) -> Path:
    config = config_of(
        "llama",
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    random_model(config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    """Save a byte-level BPE tokenizer, such as those of most models."""
    tokenizer = TokenizerFile(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(ROOT / "docs" / "operations.md").read_text(), TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
