"""The old run.py, also as `slipstream run` with its flags. Completes prompts without a server."""

from __future__ import annotations

import asyncio
import csv
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.arguments import NO_EFFECT, CommandError, Parser
from slipstream.cli.compat.classic_flags import print_version_line
from slipstream.cli.compat.run_outputs import print_completions

if TYPE_CHECKING:
    from slipstream.llm import LLM, RequestOutput, SamplingParams
    from slipstream.server.text.tokenizer import Tokenizer

_DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"

# flag of the old script without an effect here: number of values
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
_IN_REQUESTS = "Only a server takes it, in a request."
_DRAFT_HEADS = "Models with draft heads are not supported."
# flag of the old script that is refused: reason
_REFUSED = {
    "--prompt_table_path": _IN_REQUESTS,
    "--prompt_tasks": _IN_REQUESTS,
    "--num_prepend_vtokens": _IN_REQUESTS,
    "--medusa_choices": _DRAFT_HEADS,
    "--eagle_choices": _DRAFT_HEADS,
}
_EARLY_STOPPING: dict[int, Any] = {0: False, 1: True, 2: "never"}


def create_parser() -> Parser:
    parser = Parser("run.py", "Complete prompts with an engine, without a server.")
    parser.add_argument(
        "--max_output_len",
        type=int,
        required=True,
        metavar="TOKENS",
        help="Maximum number of tokens to generate.",
    )
    parser.add_argument(
        "--engine_dir",
        default="engine_outputs",
        metavar="FOLDER",
        help="Folder of the engine, or its parent.",
    )
    parser.add_argument(
        "--tokenizer_dir",
        "--tokenizer",
        metavar="FOLDER",
        help="Folder of the tokenizer (default: the engine's folder).",
    )
    _add_prompts(parser)
    _add_sampling(parser)
    _add_beam_search(parser)
    _add_outputs(parser)
    _add_engine(parser)
    _add_adapters(parser)
    _add_unused(parser)
    return parser


def _add_prompts(parser: Parser) -> None:
    group = parser.group("prompts")
    group.add_argument(
        "--input_text",
        nargs="+",
        default=[_DEFAULT_TEXT],
        metavar="TEXT",
        help="Prompts (default: a sentence about a cook).",
    )
    group.add_argument(
        "--input_file",
        type=Path,
        metavar="FILE",
        help="File with the prompts: token ids as .csv or .npy, or lines of text as .txt.",
    )
    group.add_argument(
        "--input_tokens", metavar="IDS", help="Token ids of one prompt, separated by commas."
    )
    group.add_argument(
        "--max_input_length",
        type=int,
        default=923,
        metavar="TOKENS",
        help="Truncate longer prompts at their end.",
    )
    group.add_argument(
        "--no_add_special_tokens",
        action="store_true",
        help="Tokenise the prompts without special tokens, such as BOS.",
    )


def _add_sampling(parser: Parser) -> None:
    group = parser.group("sampling")
    group.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="Divide the logits by this before sampling.",
    )
    group.add_argument(
        "--top_k",
        type=int,
        default=1,
        help="Sample from this many most likely tokens; 1: greedy, 0: all tokens.",
    )
    group.add_argument(
        "--top_p",
        type=float,
        default=0.0,
        help="Sample from the most likely tokens with this total probability; 0: all tokens.",
    )
    group.add_argument("--random_seed", type=int, default=0, help="Seed of the sampling.")
    group.add_argument(
        "--repetition_penalty",
        type=float,
        default=1.0,
        help="Divide positive logits of tokens already present by this, multiply negative ones.",
    )
    group.add_argument(
        "--presence_penalty",
        type=float,
        default=0.0,
        help="Subtract this from the logits of tokens already generated.",
    )
    group.add_argument(
        "--frequency_penalty",
        type=float,
        default=0.0,
        help="Subtract this, times their count, from the logits of tokens already generated.",
    )
    group.add_argument(
        "--num_return_sequences", type=int, default=1, help="Number of completions per prompt."
    )


def _add_beam_search(parser: Parser) -> None:
    group = parser.group("beam search")
    group.add_argument("--num_beams", type=int, default=1, help="Number of beams; 1: no search.")
    group.add_argument(
        "--length_penalty",
        type=float,
        default=1.0,
        help="Exponent of the length in the score of a beam; over 0 favours long beams.",
    )
    group.add_argument(
        "--early_stopping",
        type=int,
        default=1,
        choices=sorted(_EARLY_STOPPING),
        help="Stop when: 1: enough beams are complete, 0: a better beam is unlikely, "
        "2: a better beam is impossible.",
    )


def _add_outputs(parser: Parser) -> None:
    group = parser.group("output")
    group.add_argument(
        "--streaming", action="store_true", help="Print the text as it is generated."
    )
    group.add_argument(
        "--output_csv",
        type=Path,
        metavar="FILE",
        help="Write prompt and output ids to a CSV file instead of printing the text.",
    )
    group.add_argument(
        "--output_npy", type=Path, metavar="FILE", help="Write the ids to an .npy file instead."
    )
    group.add_argument(
        "--output_log_probs_npy",
        type=Path,
        metavar="FILE",
        help="Write the log-probabilities of the generated tokens to an .npy file.",
    )
    group.add_argument(
        "--output_cum_log_probs_npy",
        type=Path,
        metavar="FILE",
        help="Write the sum of the log-probabilities of each completion to an .npy file.",
    )
    group.add_argument(
        "--output_logits_npy",
        type=Path,
        metavar="FILE",
        help="Write the logits to FILE_context.npy and FILE_generation.npy.",
    )


def _add_engine(parser: Parser) -> None:
    group = parser.group("engine")
    group.add_argument(
        "--max_attention_window_size",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="Size of the attention window; several values are used for the layers in turn.",
    )
    group.add_argument(
        "--sink_token_length",
        type=int,
        metavar="TOKENS",
        help="Number of first tokens that stay in the attention window.",
    )
    group.add_argument(
        "--kv_cache_free_gpu_memory_fraction",
        type=float,
        metavar="FRACTION",
        help="Fraction of the free GPU memory to use for the KV cache.",
    )
    group.add_argument(
        "--max_tokens_in_paged_kv_cache",
        type=int,
        metavar="TOKENS",
        help="Size of the KV cache in tokens.",
    )
    group.add_argument(
        "--lookahead_config",
        type=_lookahead,
        metavar="[W,N,G]",
        help="Speculative decoding with N - 1 draft tokens a step, looked up in the text so far.",
    )


def _add_adapters(parser: Parser) -> None:
    group = parser.group("LoRA adapters")
    group.add_argument(
        "--lora_dir",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="Folders of adapters, from PEFT or slipstream lora.",
    )
    group.add_argument(
        "--lora_task_uids",
        type=int,
        nargs="+",
        metavar="NUMBER",
        help="Adapter of each prompt, as a position in --lora_dir from 0; -1: none.",
    )
    group.add_argument(
        "--lora_ckpt_source", default="hf", choices=["hf"], help="Format of --lora_dir."
    )


def _add_unused(parser: Parser) -> None:
    ignored = parser.no_effect_group()
    ignored.add_argument(
        "--streaming_interval", type=int, default=5, help="Every token is printed at once."
    )
    for name, values in _WITHOUT_EFFECT.items():
        extra: dict[str, Any] = {} if values else {"action": "store_const", "const": True}
        ignored.add_argument(name, help=NO_EFFECT, **extra)
    refused = parser.group("not supported")
    for name, reason in _REFUSED.items():
        refused.add_argument(name, nargs="+", help=reason)


def run(given: Namespace) -> int:
    print_version_line()
    _check_flags(given)
    from slipstream.llm import LLM  # imports torch, so a mistyped flag is reported before
    from slipstream.weights.engine_config import read_engine_config

    engine = read_engine_config(given.engine_dir).path
    with LLM(engine, **_engine_settings(given)) as llm:
        tokenizer = _tokenizer(given, llm)
        prompts = [ids[: given.max_input_length] for ids in _prompts(given, tokenizer)]
        adapters = _adapters(given, len(prompts))
        if given.streaming:
            for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
                _stream(llm, tokenizer, index, prompt, replace(_options(given), adapter=adapter))
            return 0
        found = _complete(llm, prompts, _options(given), adapters)
        print_completions(given, tokenizer, prompts, found)
    return 0


def _engine_settings(given: Namespace) -> dict[str, Any]:
    """Return the engine settings that flags override."""
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


def _options(given: Namespace) -> SamplingParams:
    from slipstream.offline.sampling_params import SamplingParams

    return SamplingParams(
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
    llm: LLM, prompts: list[list[int]], options: SamplingParams, adapters: list[Path | None]
) -> list[RequestOutput]:
    """Return the completions in the order of the prompts, one batch per adapter."""
    found: dict[int, RequestOutput] = {}
    for adapter in dict.fromkeys(adapters):
        places = [place for place, other in enumerate(adapters) if other == adapter]
        answers = llm.generate(
            [prompts[place] for place in places], replace(options, adapter=adapter)
        )
        found.update(zip(places, answers, strict=True))
    return [found[place] for place in range(len(prompts))]


def _adapters(given: Namespace, count: int) -> list[Path | None]:
    """Return the adapter of each prompt, or None, from --lora_task_uids and --lora_dir."""
    folders = given.lora_dir or []
    uids = given.lora_task_uids if given.lora_task_uids is not None else [0 if folders else -1]
    uids = uids * count if len(uids) == 1 else uids
    if len(uids) != count:
        raise CommandError(
            f"--lora_task_uids: give one for all prompts, or one for each of the {count}"
        )
    if any(not -1 <= uid < len(folders) for uid in uids):
        raise CommandError(
            "--lora_task_uids: each must be -1 or a position in --lora_dir, "
            f"which has {len(folders)} folders"
        )
    return [None if uid < 0 else folders[uid] for uid in uids]


def _check_flags(given: Namespace) -> None:
    for name, reason in _REFUSED.items():
        if getattr(given, name[2:]) is not None:
            raise CommandError(f"{name} is not supported: {reason} Leave it out.")
    if given.streaming and given.num_beams > 1:
        raise CommandError(
            "--streaming and --num_beams exclude each other: the best beam is known at the end"
        )
    for name in _WITHOUT_EFFECT:
        if getattr(given, name[2:]) is not None:
            print(f"[INFO] {name} has no effect", flush=True)


def _tokenizer(given: Namespace, llm: LLM) -> Tokenizer:
    from slipstream.server.text.tokenizer import Tokenizer

    return Tokenizer.load(Path(given.tokenizer_dir)) if given.tokenizer_dir else llm.tokenizer


def _prompts(given: Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of every prompt."""
    if given.input_tokens:
        return [[int(token) for token in given.input_tokens.split(",")]]
    if given.input_file is not None and given.input_file.suffix != ".txt":
        return _read_token_ids(given.input_file, tokenizer.eos_id)
    texts = given.input_text
    if given.input_file is not None:
        texts = given.input_file.read_text(encoding="utf-8").splitlines()
    special = not given.no_add_special_tokens
    return [tokenizer.encode(text, add_special_tokens=special) for text in texts]


def _read_token_ids(path: Path, padding: int | None) -> list[list[int]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [list(map(int, row)) for row in csv.reader(file) if row]
    if path.suffix == ".npy":
        import numpy

        rows = numpy.load(path, allow_pickle=False)
        return [row[row != padding].astype(int).tolist() for row in rows]
    raise CommandError(f"{path}: the file's name must end in .csv, .npy or .txt")


def _stream(
    llm: LLM, tokenizer: Tokenizer, index: int, prompt: list[int], options: SamplingParams
) -> None:
    """Print a completion as it is generated. The old script repeated the text at every step."""

    async def answer() -> None:
        async for piece in llm.stream(prompt, options):
            print(piece, end="", flush=True)

    print(f'Input [Text {index}]: "{tokenizer.decode(prompt, skip_special_tokens=False)}"')
    print(f'Output [Text {index} Beam 0]: "', end="")
    asyncio.run(answer())
    print('"', flush=True)
