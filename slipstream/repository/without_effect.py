"""Parameters of upstream that have no effect here, and the reason for each.

The server logs a warning at startup for every value that upstream would act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class WithoutEffect(NamedTuple):
    harmless: tuple[Any, ...]  # values without a warning: upstream's default or this server's way
    reason: str


_DECODER_ONLY = "this server runs decoder-only text models"
_OWN_PROCESSES = "the server starts a process for each instance itself, without MPI"
_OWN_SPECULATION = (
    "draft tokens come from the text itself (decoding_mode lookahead) "
    "or from the request (draft_input_ids)"
)
_AT_ONCE = "metrics are computed when they are read"

WITHOUT_EFFECT: Mapping[str, WithoutEffect] = {
    "encoder_model_path": WithoutEffect((), _DECODER_ONLY),
    "cross_kv_cache_fraction": WithoutEffect((), _DECODER_ONLY),
    "multimodal_encoders_name": WithoutEffect((), _DECODER_ONLY),
    "visual_model_path": WithoutEffect((), _DECODER_ONLY),
    "multimodal_model_path": WithoutEffect((), _DECODER_ONLY),
    "max_num_images": WithoutEffect((), _DECODER_ONLY),
    "participant_ids": WithoutEffect((), _OWN_PROCESSES),
    "num_nodes": WithoutEffect(
        (1,), "all instances run on this machine; start a server on each of the others"
    ),
    "gpu_weights_percent": WithoutEffect(
        (1.0,), "all weights are on the device; a weight-only build makes them smaller"
    ),
    "medusa_choices": WithoutEffect((), _OWN_SPECULATION),
    "eagle_choices": WithoutEffect((), _OWN_SPECULATION),
    "lookahead_window_size": WithoutEffect(
        (), "each step verifies one draft of lookahead_ngram_size - 1 tokens"
    ),
    "lookahead_verification_set_size": WithoutEffect((), "each step verifies one draft"),
    "speculative_decoding_fast_logits": WithoutEffect((False,), _OWN_SPECULATION),
    "kv_cache_onboard_blocks": WithoutEffect(
        (True,), "blocks in host memory are always copied back to the device before use"
    ),
    "cancellation_check_period_ms": WithoutEffect(
        (100,), "a cancelled request stops before the next step"
    ),
    "stats_check_period_ms": WithoutEffect((100,), _AT_ONCE),
    "iter_stats_max_iterations": WithoutEffect((1000,), _AT_ONCE),
    "request_stats_max_iterations": WithoutEffect((0,), _AT_ONCE),
    "enable_context_fmha_fp32_acc": WithoutEffect(
        (True, False), "attention always accumulates in 32 bits"
    ),
    "multi_block_mode": WithoutEffect((True,), "attention always uses the whole device"),
    "cuda_graph_mode": WithoutEffect((True, False), "decode steps always run as CUDA graphs"),
    "cuda_graph_cache_size": WithoutEffect(
        (0,), "CUDA graphs are captured at startup for a fixed list of batch sizes"
    ),
    "guided_decoding_backend": WithoutEffect(
        ("xgrammar", "llguidance"), "guided decoding has one implementation"
    ),
    "xgrammar_tokenizer_info_path": WithoutEffect(
        (), "the text of each token comes from the engine's tokenizer"
    ),
}
