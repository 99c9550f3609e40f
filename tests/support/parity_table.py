"""Prints the table of parity in docs/reference/parity.md, or writes it there with --write.

PYTHONPATH=tests/support:tests/model python tests/support/parity_table.py --write
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from family_variants import VARIANTS, Variant
from run_engine import logits_in_steps
from test_parity import VARIANTS as OLDER_VARIANTS
from tiny_models import VOCABULARY, config_of, folder_tensors, random_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "parity.md"
HEAD = "| family | variants | largest difference |\n|---|---|---|\n"
TOKENS = torch.randint(3, VOCABULARY, (45,), generator=torch.Generator().manual_seed(5)).tolist()
STEPS = (19, 20, 1, 1, 4)


def variants_by_family() -> dict[str, list[str]]:
    """Return the names of the variants of each family, as the table lists them."""
    found = defaultdict(list)
    for name, (family, _) in OLDER_VARIANTS.items():
        found[family].append(name)
    for name, variant in VARIANTS.items():
        found[variant.family].append(name)
    return dict(found)


def short_names(names: list[str]) -> list[str]:
    """Return the names without what they share with the first one, which is the usual form."""
    return ["usual", *(name.removeprefix(f"{names[0].split('-')[0]}-") for name in names[1:])]


def largest_difference(name: str) -> float:
    """Return the largest difference of a logit between a variant and transformers."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if name in VARIANTS:
            variant = VARIANTS[name]
            model = variant.model()
        else:
            family, options = OLDER_VARIANTS[name]
            variant = Variant(family, "")
            model = random_model(config_of(family, **options)).eval()
        variant.write(model, folder)
        spec, tensors = folder_tensors(folder)
        ours = logits_in_steps(spec, tensors, torch.float32, TOKENS, STEPS)
        return float((ours - variant.logits(model, TOKENS)).abs().max())


def table() -> str:
    rows = []
    for family, names in sorted(variants_by_family().items(), key=lambda item: item[0].lower()):
        largest = max(map(largest_difference, names))
        rows.append(f"| {family} | {', '.join(short_names(names))} | {largest:.0e} |\n")
    return HEAD + "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="Write the table to docs/reference/parity.md."
    )
    made = table()
    if not parser.parse_args().write:
        print(made)
        return
    text = DOCUMENT.read_text()
    pattern = re.compile(re.escape(HEAD) + r"(\|.*\n)*")
    DOCUMENT.write_text(pattern.sub(lambda _: made, text, count=1))


if __name__ == "__main__":
    main()
