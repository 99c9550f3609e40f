"""Train a LoRA adapter on the lines of a text file, with peft.

    python examples/lora/train_adapter.py adapters/pirate --text examples/lora/pirate.txt

It is as small as training can be: each line is one example, and there is no validation. For real
data, use a trainer, such as trl's; its adapters are served in the same way.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", type=Path, help="folder to write")
    parser.add_argument("--model", help="Hugging Face folder, hub id or GGUF file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rate", type=float, default=2e-3)
    given = parser.parse_args()
    model, tokenizer = load(given.model or default_model())
    config = LoraConfig(
        r=given.rank, lora_alpha=2 * given.rank, target_modules=["q_proj", "k_proj", "v_proj"]
    )
    torch.manual_seed(0)
    adapted = get_peft_model(model, config)
    examples = [
        tokenizer(line, return_tensors="pt")["input_ids"] for line in read_lines(given.text)
    ]
    optimizer = torch.optim.AdamW(
        [weight for weight in adapted.parameters() if weight.requires_grad], lr=given.rate
    )
    adapted.train()
    for epoch in range(given.epochs):
        total = 0.0
        for tokens in examples:
            loss = adapted(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss)
        print(f"epoch {epoch + 1} of {given.epochs}: loss {total / len(examples):.3f}")
    adapted.save_pretrained(given.adapter)
    print(f"wrote {given.adapter}")


def read_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()]


def load(model: str):
    """Return a model in float32 and its tokenizer."""
    path = Path(model)
    if path.suffix == ".gguf":
        source, options = path.parent, {"gguf_file": path.name}
    else:
        source, options = model, {}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options), tokenizer


def default_model() -> str:
    """Return the GGUF file that `slipstream start` has fetched."""
    from slipstream.weights.home import slipstream_home

    for path in sorted(slipstream_home().rglob("*.gguf")):
        return str(path)
    raise SystemExit("run `slipstream import -m smollm2-135m` first, or give --model")


if __name__ == "__main__":
    main()
