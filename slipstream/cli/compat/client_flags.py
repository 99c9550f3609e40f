"""The flags of inflight_batcher_llm_client.py, of every release."""

from __future__ import annotations

from pathlib import Path

from slipstream.cli.arguments import Parser

DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"
# Tensors that ask for more outputs, sent where their flag is given.
QUESTIONS = (
    "return-context-logits",
    "return-generation-logits",
    "return-kv-cache-reuse-stats",
    "return-perf-metrics",
    "return-num-input-tokens",
    "return-num-output-tokens",
)


def client_parser() -> Parser:
    parser = Parser(
        "slipstream client", description="Send tokens to an engine model and print what comes back."
    )
    _add_connection(parser)
    _add_prompt(parser)
    _add_sampling(parser)
    _add_adapters(parser)
    _add_answer(parser)
    return parser


def _add_connection(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="No effect: everything that comes back is printed.",
    )
    add("-u", "--url", default="localhost:8001", help="The server's gRPC address.")
    add("--model-name", default="tensorrt_llm", help="The engine model.")
    add("-s", "--ssl", action="store_true", help="Connect over TLS.")
    add("-r", "--root-certificates", type=Path, help="With --ssl: whom to trust, a PEM file.")
    add("-p", "--private-key", type=Path, help="With --ssl: the client's key, a PEM file.")
    add(
        "-x",
        "--certificate-chain",
        type=Path,
        help="With --ssl: the client's certificate, a PEM file.",
    )
    add("-t", "--stream-timeout", type=float, help="Seconds that a stream may take.")
    add(
        "-C",
        "--grpc-compression-algorithm",
        choices=["deflate", "gzip", "none"],
        help="Compress what is sent.",
    )
    add(
        "--request-id",
        "--request_id",
        default="",
        help="The request's id; a stop order makes one up.",
    )
    add(
        "-S",
        "--streaming",
        action="store_true",
        help="Take the answer piece by piece; needs a decoupled model.",
    )
    add(
        "--stop-after-ms", type=int, default=0, help="Send a stop order after so many milliseconds."
    )
    add("--stop-via-request-cancel", action="store_true", help="Cancel the call instead.")


def _add_prompt(parser: Parser) -> None:
    add = parser.add_argument
    add("--text", default=DEFAULT_TEXT, help="The prompt.")
    add("--input-tokens-csv", type=Path, help="The prompt's ids instead, in the first row.")
    add("--tokenizer-dir", help="Default: the server's own text models do it.")
    add(
        "--tokenizer-type",
        default="auto",
        choices=["auto", "t5", "llama", "sp"],
        help="No effect: the tokenizer's files say what it is.",
    )
    add("--end-id", type=int, default=50256, help="With --input-tokens-csv; else the tokenizer's.")
    add("--pad-id", type=int, default=50256, help="With --input-tokens-csv; else the tokenizer's.")
    add("--draft-tokens-csv", type=Path, help="Ids that may come next, in the first row.")
    add(
        "--prompt-embedding-table-path",
        type=Path,
        help="Rows of a tuned prompt: .npy, [tasks, rows, hidden].",
    )
    add("--prompt-task-id", type=int, default=0, help="Which task of that table.")
    add(
        "--dtype",
        default="float16",
        choices=["float16", "float32"],
        help="The type that table is sent in.",
    )
    add(
        "--prompt_table_extra_id",
        type=int,
        help="Tells cached rows of one tuned prompt from another's.",
    )
    add(
        "--vocab_size",
        type=int,
        default=50257,
        help="With --prompt_table_extra_id: ids from here on are rows.",
    )


def _add_sampling(parser: Parser) -> None:
    add = parser.add_argument
    add("--request-output-len", type=int, default=16, help="The longest answer, in tokens.")
    add("-b", "--beam-width", type=int, default=1, help="How many answers a beam search keeps.")
    add("-n", "--num-return-sequences", type=int, help="How many answers to sample.")
    add("--temperature", type=float, default=1.0, help="Over 1: bolder, under 1: more certain.")
    add("--top-k", type=int, default=1, help="Choose among so many tokens; 1 is greedy, 0 all.")
    add(
        "--top-p",
        type=float,
        default=0.0,
        help="Choose among the likeliest tokens of this share; 0: all.",
    )
    for name in ("repetition", "presence", "frequency"):
        add(
            f"--{name}-penalty",
            type=float,
            help="Against tokens that were there already; sent where it is given.",
        )


def _add_adapters(parser: Parser) -> None:
    parser.add_argument(
        "--lora-path", type=Path, help="An adapter: a folder that slipstream lora wrote."
    )
    parser.add_argument(
        "--lora-task-id", type=int, help="The adapter's number in the server's cache."
    )


def _add_answer(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--exclude-input-in-output",
        action="store_true",
        help="Ask for the answer without the prompt.",
    )
    add(
        "--return-log-probs", action="store_true", help="Ask for log-probabilities, and print them."
    )
    for name in QUESTIONS:
        add(f"--{name}", action="store_true", help="Ask for it, and print it.")
    add(
        "--requested-outputs",
        nargs="*",
        default=[],
        help="Ask for these outputs; the answer must hold just them.",
    )
    add(
        "-c", "--check-output", action="store_true", help="PASS! or FAIL!, and exit code 1 on FAIL."
    )
    add(
        "--output-tokens-csv",
        type=Path,
        help="What --check-output compares with; default: GPT-2's answer.",
    )
    add(
        "--correctness-threshold", type=float, default=1.0, help="The share of ids that must agree."
    )
