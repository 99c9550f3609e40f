"""`slipstream run`: the old run.py. One engine, a few prompts, no server."""

from __future__ import annotations

import asyncio
import csv
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.compat.run_outputs import give_out
from slipstream.cli.versions import print_version_line

if TYPE_CHECKING:
    from slipstream.llm import LLM, Completion, SamplingOptions
    from slipstream.server.text.tokenizer import Tokenizer

_DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"

# Options that were there and have no meaning here; each is said so in one line.
_WITHOUT_EFFECT = {
    "--use_py_session": 0,
    "--debug_mode": 0,
    "--run_profiling": 0,
    "--no_prompt_template": 0,
    "--vocab_file": 1,
    "--tokenizer_type": 1,
    "--log_level": 1,
    "--gpu_weights_percent": 1,
    "--kv_cache_enable_block_reuse": 0,
    "--enable_chunked_context": 0,
    "--multi_block_mode": 1,
    "--cuda_graph_mode": 0,
    "--enable_context_fmha_fp32_acc": 0,
}
_NOT_SERVED = {
    "--prompt_table_path": 1,
    "--prompt_tasks": 1,
    "--num_prepend_vtokens": "+",
    "--medusa_choices": 1,
    "--eagle_choices": 1,
}
_EARLY_STOPPING: dict[int, Any] = {0: False, 1: True, 2: "never"}


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    print_version_line()
    _explain(given)
    from slipstream.llm import LLM  # torch, which a mistyped flag need not wait for
    from slipstream.weights.engine_config import read_engine_config

    engine = read_engine_config(given.engine_dir).path
    with LLM(engine, **_settings(given)) as llm:
        tokenizer = _tokenizer(given, llm)
        prompts = [ids[: given.max_input_length] for ids in _prompts(given, tokenizer)]
        adapters = _adapters(given, len(prompts))
        if given.streaming:
            for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
                _stream(llm, tokenizer, index, prompt, replace(_options(given), adapter=adapter))
            return 0
        give_out(given, tokenizer, prompts, _complete(llm, prompts, _options(given), adapters))
    return 0


def _settings(given: Namespace) -> dict[str, Any]:
    """What the flags ask of the engine itself; what is not given stays as the engine has it."""
    wanted = {
        "attention_windows": given.max_attention_window_size,
        "sink_tokens": given.sink_token_length,
        "cache_memory_fraction": given.kv_cache_free_gpu_memory_fraction,
        "cache_tokens": given.max_tokens_in_paged_kv_cache,
        "lookup_tokens": None if given.lookahead_config is None else given.lookahead_config[1] - 1,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _lookahead(text: str) -> list[int]:
    numbers = [int(number) for number in text.strip("[]").split(",")]
    if len(numbers) != 3 or numbers[1] < 2:
        raise ValueError(text)
    return numbers


def _options(given: Namespace) -> SamplingOptions:
    from slipstream.llm import SamplingOptions

    return SamplingOptions(
        max_tokens=given.max_output_len,
        temperature=0.0 if given.top_k == 1 else given.temperature,
        top_k=given.top_k,
        top_p=given.top_p or 1.0,
        seed=given.random_seed,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        log_probs=bool(given.output_log_probs_npy or given.output_cum_log_probs_npy),
        context_logits=given.output_logits_npy is not None,
        generation_logits=given.output_logits_npy is not None,
        beam_width=given.num_beams,
        length_penalty=given.length_penalty if given.num_beams > 1 else 0.0,
        early_stopping=_EARLY_STOPPING[given.early_stopping],
        n=given.num_return_sequences,
    )


def _complete(
    llm: LLM, prompts: list[list[int]], options: SamplingOptions, adapters: list[Path | None]
) -> list[Completion]:
    """The answers in the order of the prompts; those with the same adapter are asked for together."""
    found: dict[int, Completion] = {}
    for adapter in dict.fromkeys(adapters):
        places = [place for place, other in enumerate(adapters) if other == adapter]
        answers = llm.generate(
            [prompts[place] for place in places], replace(options, adapter=adapter)
        )
        found.update(zip(places, answers, strict=True))
    return [found[place] for place in range(len(prompts))]


def _adapters(given: Namespace, count: int) -> list[Path | None]:
    """The adapter of each prompt: --lora_task_uids counts through --lora_dir, and -1 is none."""
    folders = given.lora_dir or []
    uids = given.lora_task_uids if given.lora_task_uids is not None else [0 if folders else -1]
    uids = uids * count if len(uids) == 1 else uids
    if len(uids) != count:
        raise CommandError(
            f"--lora_task_uids: give one for all prompts, or one for each of the {count}"
        )
    if any(not -1 <= uid < len(folders) for uid in uids):
        raise CommandError(
            f"--lora_task_uids: each is -1 or counts through the {len(folders)} of --lora_dir, from 0"
        )
    return [None if uid < 0 else folders[uid] for uid in uids]


def _parser() -> Parser:
    parser = Parser(
        "slipstream run", description="Complete prompts with an engine, without a server."
    )
    parser.add_argument(
        "--max_output_len", type=int, required=True, help="The longest answer, in tokens."
    )
    parser.add_argument(
        "--engine_dir", default="engine_outputs", help="The engine's folder, or the one around it."
    )
    parser.add_argument(
        "--tokenizer_dir", "--tokenizer", help="Default: the tokenizer in the engine's folder."
    )
    parser.add_argument(
        "--input_text", nargs="+", default=[_DEFAULT_TEXT], help="One prompt or several."
    )
    parser.add_argument(
        "--input_file", type=Path, help="Token ids as .csv or .npy, or lines of text as .txt."
    )
    parser.add_argument("--input_tokens", help="Token ids with commas between.")
    parser.add_argument(
        "--max_input_length", type=int, default=923, help="Longer prompts are cut off at their end."
    )
    parser.add_argument(
        "--output_csv", type=Path, help="Write all ids there instead of printing the texts."
    )
    parser.add_argument("--output_npy", type=Path, help="The same, as an array.")
    parser.add_argument(
        "--output_log_probs_npy", type=Path, help="Write the tokens' log-probabilities."
    )
    parser.add_argument("--output_cum_log_probs_npy", type=Path, help="Write the sums of them.")
    parser.add_argument(
        "--num_beams", type=int, default=1, help="How many answers a beam search keeps."
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="Over 1: bolder, under 1: more certain."
    )
    parser.add_argument(
        "--top_k", type=int, default=1, help="Choose among so many tokens; 1 is greedy."
    )
    parser.add_argument(
        "--top_p", type=float, default=0.0, help="Choose among the likeliest of this share; 0: all."
    )
    parser.add_argument(
        "--random_seed", type=int, default=0, help="The same seed gives the same answer."
    )
    parser.add_argument(
        "--repetition_penalty", type=float, default=1.0, help="Against tokens that were there."
    )
    parser.add_argument(
        "--presence_penalty", type=float, default=0.0, help="Lower them by so much."
    )
    parser.add_argument(
        "--frequency_penalty", type=float, default=0.0, help="Lower them by so much for each time."
    )
    parser.add_argument(
        "--no_add_special_tokens", action="store_true", help="Take the prompt just as it is."
    )
    parser.add_argument("--streaming", action="store_true", help="Print the answer piece by piece.")
    parser.add_argument(
        "--streaming_interval", type=int, default=5, help="Every piece is shown when it comes."
    )
    parser.add_argument(
        "--length_penalty",
        type=float,
        default=1.0,
        help="Of a beam search: over 0 favours long ones.",
    )
    parser.add_argument(
        "--early_stopping",
        type=int,
        default=1,
        choices=sorted(_EARLY_STOPPING),
        help="Of a beam search: 1 ends it with enough answers, 0 when no better is likely, 2 possible.",
    )
    parser.add_argument(
        "--num_return_sequences", type=int, default=1, help="How many answers to sample."
    )
    parser.add_argument(
        "--output_logits_npy", type=Path, help="Write NAME_context.npy and NAME_generation.npy."
    )
    parser.add_argument(
        "--max_attention_window_size",
        type=int,
        nargs="+",
        help="Tokens that layers look back at most; several: layer by layer, in turn.",
    )
    parser.add_argument(
        "--sink_token_length",
        type=int,
        help="Of such a window, how many are the first of the text.",
    )
    parser.add_argument(
        "--kv_cache_free_gpu_memory_fraction", type=float, help="Of a GPU's memory, for the cache."
    )
    parser.add_argument(
        "--max_tokens_in_paged_kv_cache", type=int, help="The cache's size in tokens."
    )
    parser.add_argument(
        "--lookahead_config",
        type=_lookahead,
        metavar="[W,N,G]",
        help="Guess N - 1 tokens a step from the text itself.",
    )
    parser.add_argument(
        "--lora_dir", type=Path, nargs="+", help="Adapters, as peft or slipstream lora writes them."
    )
    parser.add_argument(
        "--lora_task_uids", type=int, nargs="+", help="Which of them each prompt takes; -1: none."
    )
    parser.add_argument(
        "--lora_ckpt_source", default="hf", choices=["hf"], help="What --lora_dir holds."
    )
    for table in (_WITHOUT_EFFECT, _NOT_SERVED):
        for name, count in table.items():
            extra: dict[str, Any] = {"nargs": count} if isinstance(count, str) else {}
            if count == 0:
                extra = {"action": "store_const", "const": True}
            parser.add_argument(
                name, help="No effect here." if table is _WITHOUT_EFFECT else "Refused.", **extra
            )
    return parser


def _explain(given: Namespace) -> None:
    for name in _NOT_SERVED:
        if getattr(given, name[2:]) is not None:
            why = (
                "models with draft heads are not run"
                if "choices" in name
                else "a server takes it, in a request"
            )
            raise CommandError(f"{name} is refused: {why}; leave it out")
    if given.streaming and given.num_beams > 1:
        raise CommandError(
            "--streaming and --num_beams exclude each other: which beam is best shows at the end"
        )
    for name in _WITHOUT_EFFECT:
        if getattr(given, name[2:]) is not None:
            print(f"[INFO] {name} changes nothing here", flush=True)


def _tokenizer(given: Namespace, llm: LLM) -> Tokenizer:
    from slipstream.server.text.tokenizer import Tokenizer

    return Tokenizer.load(Path(given.tokenizer_dir)) if given.tokenizer_dir else llm.tokenizer


def _prompts(given: Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    if given.input_tokens:
        return [[int(token) for token in given.input_tokens.split(",")]]
    texts = given.input_text
    if given.input_file is not None:
        kind = given.input_file.suffix
        if kind == ".csv":
            with given.input_file.open(newline="") as file:
                return [[int(token) for token in row] for row in csv.reader(file) if row]
        if kind == ".npy":
            import numpy

            rows = numpy.load(given.input_file, allow_pickle=False)
            return [[int(token) for token in row if token != tokenizer.eos_id] for row in rows]
        if kind != ".txt":
            raise CommandError(
                f"{given.input_file}: the file's name must end in .csv, .npy or .txt"
            )
        texts = given.input_file.read_text(encoding="utf-8").splitlines()
    return [
        tokenizer.encode(text, add_special_tokens=not given.no_add_special_tokens) for text in texts
    ]


def _stream(
    llm: LLM, tokenizer: Tokenizer, index: int, prompt: list[int], options: SamplingOptions
) -> None:
    """Each piece as it comes; the old script printed the whole answer again and again."""

    async def answer() -> None:
        async for piece in llm.stream(prompt, options):
            print(piece, end="", flush=True)

    print(f'Input [Text {index}]: "{tokenizer.decode(prompt, skip_special_tokens=False)}"')
    print(f'Output [Text {index} Beam 0]: "', end="")
    asyncio.run(answer())
    print('"', flush=True)
