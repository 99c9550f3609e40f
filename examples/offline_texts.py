"""Many prompts in one Python process, without a server: a line of the input is a prompt.

    python examples/offline_texts.py prompts.txt answers.jsonl --model smollm2-135m

All prompts run together: the engine starts one as soon as there is room. In a terminal a line shows
the progress. `slipstream batch` does the same for files in OpenAI's batch format.
"""

import argparse
import json
import time
from pathlib import Path

from slipstream import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    prompts = [line for line in given.prompts.read_text().splitlines() if line.strip()]
    params = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature)
    with LLM(given.model) as llm, given.answers.open("w") as answers:
        begun = time.monotonic()
        outputs = llm.generate(prompts, params)
        for output in outputs:
            record = {"prompt": output.prompt, "text": output.text, "why": output.finish_reason}
            print(json.dumps(record), file=answers)
        seconds = time.monotonic() - begun
    tokens = sum(len(output.token_ids) for output in outputs)
    print(f"{len(prompts)} prompts, {tokens} tokens, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
