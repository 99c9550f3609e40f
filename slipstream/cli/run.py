"""`slipstream run`: the old run.py. One engine, a few prompts, no server."""

from __future__ import annotations

import asyncio
import csv
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.versions import print_version_line

if TYPE_CHECKING:
    from slipstream.llm import LLM, Completion, SamplingOptions
    from slipstream.server.text.tokenizer import Tokenizer

_DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"

# Options that were there and have no meaning here; each is said so in one line.
_WITHOUT_EFFECT = {
    "--use_py_session": 0, "--debug_mode": 0, "--run_profiling": 0, "--no_prompt_template": 0, "--vocab_file": 1,
    "--tokenizer_type": 1, "--log_level": 1, "--early_stopping": 1, "--length_penalty": 1, "--gpu_weights_percent": 1,
    "--kv_cache_free_gpu_memory_fraction": 1, "--kv_cache_enable_block_reuse": 0, "--enable_chunked_context": 0,
    "--multi_block_mode": 1, "--cuda_graph_mode": 0, "--enable_context_fmha_fp32_acc": 0,
    "--max_tokens_in_paged_kv_cache": 1,
}  # fmt: skip
_NOT_SERVED = {
    "--output_logits_npy": 1, "--prompt_table_path": 1, "--prompt_tasks": 1, "--num_prepend_vtokens": "+",
    "--medusa_choices": 1, "--lora_dir": "+", "--lora_task_uids": "+", "--lora_ckpt_source": 1,
    "--sink_token_length": 1, "--max_attention_window_size": "+", "--lookahead_config": 1, "--eagle_choices": 1,
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    print_version_line()
    _explain(given)
    from slipstream.llm import LLM, SamplingOptions  # torch, which a mistyped flag need not wait for
    from slipstream.weights.engine_config import read_engine_config

    engine = read_engine_config(given.engine_dir).path
    with LLM(engine) as llm:
        tokenizer = _tokenizer(given, llm)
        prompts = [ids[: given.max_input_length] for ids in _prompts(given, tokenizer)]
        options = SamplingOptions(
            max_tokens=given.max_output_len,
            temperature=0.0 if given.top_k == 1 else given.temperature,
            top_k=given.top_k,
            top_p=given.top_p or 1.0,
            seed=given.random_seed,
            repetition_penalty=given.repetition_penalty,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
            log_probs=bool(given.output_log_probs_npy or given.output_cum_log_probs_npy),
        )
        if given.streaming:
            _stream(llm, tokenizer, prompts, options)
            return 0
        completions = llm.generate(prompts, options)
        _give_out(given, tokenizer, prompts, completions)
    return 0


def _parser() -> Parser:
    parser = Parser("slipstream run", description="Complete prompts with an engine, without a server.")
    parser.add_argument("--max_output_len", type=int, required=True, help="The longest answer, in tokens.")
    parser.add_argument("--engine_dir", default="engine_outputs", help="The engine's folder, or the one around it.")
    parser.add_argument("--tokenizer_dir", "--tokenizer", help="Default: the tokenizer in the engine's folder.")
    parser.add_argument("--input_text", nargs="+", default=[_DEFAULT_TEXT])
    parser.add_argument("--input_file", type=Path, help="Token ids as .csv or .npy, or lines of text as .txt.")
    parser.add_argument("--input_tokens", help="Token ids with commas between.")
    parser.add_argument("--max_input_length", type=int, default=923, help="Longer prompts are cut off at their end.")
    parser.add_argument("--output_csv", type=Path)
    parser.add_argument("--output_npy", type=Path)
    parser.add_argument("--output_log_probs_npy", type=Path)
    parser.add_argument("--output_cum_log_probs_npy", type=Path)
    parser.add_argument("--num_beams", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=1)
    parser.add_argument("--top_p", type=float, default=0.0)
    parser.add_argument("--random_seed", type=int, default=0)
    parser.add_argument("--repetition_penalty", type=float, default=1.0)
    parser.add_argument("--presence_penalty", type=float, default=0.0)
    parser.add_argument("--frequency_penalty", type=float, default=0.0)
    parser.add_argument("--no_add_special_tokens", action="store_true")
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--streaming_interval", type=int, default=5, help="Every piece is shown when it comes.")
    for table in (_WITHOUT_EFFECT, _NOT_SERVED):
        for name, count in table.items():
            extra: dict[str, Any] = {"nargs": count} if isinstance(count, str) else {}
            if count == 0:
                extra = {"action": "store_const", "const": True}
            parser.add_argument(name, help="No effect here." if table is _WITHOUT_EFFECT else "Refused.", **extra)
    return parser


def _explain(given: Namespace) -> None:
    for name in _NOT_SERVED:
        if getattr(given, name[2:]) is not None:
            raise CommandError(f"{name}: this is not available without a server yet; leave it out")
    if given.num_beams > 1:
        raise CommandError("--num_beams: beam search is not available yet; leave it out")
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
            raise CommandError(f"{given.input_file}: the file's name must end in .csv, .npy or .txt")
        texts = given.input_file.read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode(text, add_special_tokens=not given.no_add_special_tokens) for text in texts]


def _give_out(
    given: Namespace, tokenizer: Tokenizer, prompts: list[list[int]], completions: list[Completion]
) -> None:
    if given.output_csv is None and given.output_npy is None:
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            _print_pair(index, tokenizer, prompt, completion.text)
    else:
        _write_ids(given, tokenizer, [[*prompt, *one.tokens] for prompt, one in zip(prompts, completions, strict=True)])
    _write_log_probs(given, completions)


def _print_pair(index: int, tokenizer: Tokenizer, prompt: list[int], text: str) -> None:
    print(f'Input [Text {index}]: "{tokenizer.decode(prompt, skip_special_tokens=False)}"')
    print(f'Output [Text {index} Beam 0]: "{text}"', flush=True)


def _padded(rows: list[list[Any]], filler: Any) -> list[list[Any]]:
    longest = max(map(len, rows))
    return [[*row, *[filler] * (longest - len(row))] for row in rows]


def _write_ids(given: Namespace, tokenizer: Tokenizer, rows: list[list[int]]) -> None:
    import numpy

    filler = tokenizer.eos_id if tokenizer.eos_id is not None else 0
    if given.output_csv is not None:
        given.output_csv.parent.mkdir(parents=True, exist_ok=True)
        with given.output_csv.open("w", newline="") as file:
            csv.writer(file).writerows(_padded(rows, filler))
    if given.output_npy is not None:
        given.output_npy.parent.mkdir(parents=True, exist_ok=True)
        numpy.save(given.output_npy, numpy.array(_padded(rows, filler), dtype=numpy.int32))


def _write_log_probs(given: Namespace, completions: list[Completion]) -> None:
    import numpy

    values = [completion.log_probs or [] for completion in completions]
    if given.output_log_probs_npy is not None:
        numpy.save(given.output_log_probs_npy, numpy.array(_padded(values, 0.0), dtype=numpy.float32)[:, None])
    if given.output_cum_log_probs_npy is not None:
        numpy.save(given.output_cum_log_probs_npy, numpy.array([[sum(row)] for row in values], dtype=numpy.float32))


def _stream(llm: LLM, tokenizer: Tokenizer, prompts: list[list[int]], options: SamplingOptions) -> None:
    """Each piece as it comes; the old script printed the whole answer again and again."""

    async def one(prompt: list[int]) -> None:
        async for piece in llm.stream(prompt, options):
            print(piece, end="", flush=True)

    for index, prompt in enumerate(prompts):
        print(f'Input [Text {index}]: "{tokenizer.decode(prompt, skip_special_tokens=False)}"')
        print(f'Output [Text {index} Beam 0]: "', end="")
        asyncio.run(one(prompt))
        print('"', flush=True)
