"""The flags of inflight_batcher_llm_client.py, of every release."""

from __future__ import annotations

from pathlib import Path

from slipstream.cli.arguments import Parser, add_verbose
from slipstream.cli.compat.request_flags import add_penalties

DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"
# input tensor that asks for a further output: its description
FURTHER_OUTPUTS = {
    "return_context_logits": "the logits of the prompt",
    "return_generation_logits": "the logits of the generated tokens",
    "return_kv_cache_reuse_stats": "the statistics of KV cache reuse",
    "return_perf_metrics": "the times of the request's phases",
    "return_num_input_tokens": "the number of prompt tokens",
    "return_num_output_tokens": "the number of generated tokens",
}


def create_parser() -> Parser:
    parser = Parser("slipstream client", "Send tokens to an engine model and print the answer.")
    _add_connection(parser)
    _add_tls(parser)
    _add_stop(parser)
    _add_prompt(parser)
    _add_prompt_tuning(parser)
    _add_adapter(parser)
    _add_sampling(parser)
    _add_answer(parser)
    ignored = parser.no_effect_group()
    ignored.add_argument(
        "--tokenizer-type",
        default="auto",
        choices=["auto", "t5", "llama", "sp"],
        help="The type is read from the tokenizer's files.",
    )
    add_verbose(ignored)
    return parser


def _add_connection(parser: Parser) -> None:
    add = parser.group("connection").add_argument
    add(
        "-u",
        "--url",
        default="localhost:8001",
        metavar="HOST:PORT",
        help="gRPC address of the server.",
    )
    add("--model-name", default="tensorrt_llm", help="Name of the engine model.")
    add(
        "-S",
        "--streaming",
        action="store_true",
        help="Receive the tokens as they are generated; needs a decoupled model.",
    )
    add(
        "-t",
        "--stream-timeout",
        type=float,
        metavar="SECONDS",
        help="Fail if a stream takes longer (default: no limit).",
    )
    add(
        "-C",
        "--grpc-compression-algorithm",
        choices=["deflate", "gzip", "none"],
        help="Compression of the requests (default: none).",
    )


def _add_tls(parser: Parser) -> None:
    add = parser.group("TLS").add_argument
    add("-s", "--ssl", action="store_true", help="Connect over TLS.")
    add(
        "-r",
        "--root-certificates",
        type=Path,
        metavar="FILE",
        help="With --ssl: PEM file of trusted root certificates.",
    )
    add(
        "-p",
        "--private-key",
        type=Path,
        metavar="FILE",
        help="With --ssl: PEM file of the client's private key.",
    )
    add(
        "-x",
        "--certificate-chain",
        type=Path,
        metavar="FILE",
        help="With --ssl: PEM file of the client's certificate chain.",
    )


def _add_stop(parser: Parser) -> None:
    add = parser.group("stop requests").add_argument
    add(
        "--request-id",
        default="",
        metavar="ID",
        help="Id of the request (default: none, or a random one with --stop-after-ms).",
    )
    add(
        "--stop-after-ms",
        type=int,
        default=0,
        metavar="MILLISECONDS",
        help="Send a stop request after this long; 0: never.",
    )
    add(
        "--stop-via-request-cancel",
        action="store_true",
        help="With --stop-after-ms: cancel the call instead of sending a stop request.",
    )


def _add_prompt(parser: Parser) -> None:
    add = parser.group("prompt").add_argument
    add("--text", default=DEFAULT_TEXT, help="Prompt.")
    add(
        "--input-tokens-csv",
        type=Path,
        metavar="FILE",
        help="CSV file whose first row holds the token ids of the prompt.",
    )
    add(
        "--tokenizer-dir",
        metavar="FOLDER",
        help="Folder of the tokenizer (default: the server's text models tokenise).",
    )
    for name in ("--end-id", "--pad-id"):
        add(
            name,
            type=int,
            default=50256,
            metavar="ID",
            help=f"With --input-tokens-csv: the {name[2:5]} token.",
        )
    add(
        "--draft-tokens-csv",
        type=Path,
        metavar="FILE",
        help="CSV file whose first row holds draft tokens.",
    )


def _add_prompt_tuning(parser: Parser) -> None:
    add = parser.group("prompt tuning").add_argument
    add(
        "--prompt-embedding-table-path",
        type=Path,
        metavar="FILE",
        help="Prompt-tuning table: an .npy file [tasks, rows, hidden].",
    )
    add("--prompt-task-id", type=int, default=0, metavar="TASK", help="Task of that table.")
    add(
        "--dtype",
        default="float16",
        choices=["float16", "float32"],
        help="Data type in which that table is sent.",
    )
    add(
        "--prompt_table_extra_id",
        type=int,
        metavar="ID",
        help="Id that separates the cached blocks of different prompt-tuning tables.",
    )
    add(
        "--vocab_size",
        type=int,
        default=50257,
        metavar="TOKENS",
        help="With --prompt_table_extra_id: token ids from here on are rows of the table.",
    )


def _add_adapter(parser: Parser) -> None:
    add = parser.group("LoRA").add_argument
    add(
        "--lora-path",
        type=Path,
        metavar="FOLDER",
        help="LoRA adapter to send: a folder that slipstream lora wrote.",
    )
    add("--lora-task-id", type=int, metavar="ID", help="Id of the adapter in the server's cache.")


def _add_sampling(parser: Parser) -> None:
    add = parser.group("sampling").add_argument
    add(
        "--request-output-len",
        type=int,
        default=16,
        metavar="TOKENS",
        help="Maximum number of tokens to generate.",
    )
    add("-b", "--beam-width", type=int, default=1, help="Number of beams of a beam search.")
    add(
        "-n",
        "--num-return-sequences",
        type=int,
        metavar="NUMBER",
        help="Number of sequences to sample (default: 1).",
    )
    add("--temperature", type=float, default=1.0, help="Divide the logits by this before sampling.")
    add(
        "--top-k",
        type=int,
        default=1,
        help="Sample from this many most likely tokens; 1: greedy, 0: all tokens.",
    )
    add(
        "--top-p",
        type=float,
        default=0.0,
        help="Sample from the most likely tokens with this total probability; 0: all tokens.",
    )
    add_penalties(parser.group("penalties"))


def _add_answer(parser: Parser) -> None:
    add = parser.group("answer").add_argument
    add(
        "--exclude-input-in-output",
        action="store_true",
        help="Ask for the generated tokens without the prompt.",
    )
    add("--return-log-probs", action="store_true", help="Ask for log-probabilities and print them.")
    for name, description in FURTHER_OUTPUTS.items():
        add(
            f"--{name.replace('_', '-')}",
            action="store_true",
            help=f"Ask for {description} and print them.",
        )
    add(
        "--requested-outputs",
        nargs="*",
        default=[],
        metavar="NAME",
        help="Ask for exactly these outputs (default: all).",
    )
    add(
        "-c",
        "--check-output",
        action="store_true",
        help="Print PASS! or FAIL!; the exit code is 1 on FAIL.",
    )
    add(
        "--output-tokens-csv",
        type=Path,
        metavar="FILE",
        help="CSV file with the ids that --check-output expects (default: GPT-2's answer).",
    )
    add(
        "--correctness-threshold",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="With --check-output: share of ids that must be equal.",
    )
