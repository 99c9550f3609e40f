"""Parameters that mean something upstream and nothing here: the values that ask for nothing, and
why the others are not followed. A warning says so at the start; nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class WithoutEffect(NamedTuple):
    harmless: tuple[Any, ...]  # what upstream does by default, or what is done here anyway
    reason: str


_DECODER_ONLY = "this server runs decoder-only models of text"
_ONE_DEVICE = "an engine runs on one device"
_OWN_SPECULATION = "guesses come from the text itself (decoding_mode lookahead) or with the request (draft_input_ids)"
_AT_ONCE = "metrics are current when they are read"

WITHOUT_EFFECT: Mapping[str, WithoutEffect] = {
    "encoder_model_path": WithoutEffect((), _DECODER_ONLY),
    "cross_kv_cache_fraction": WithoutEffect((), _DECODER_ONLY),
    "multimodal_encoders_name": WithoutEffect((), _DECODER_ONLY),
    "visual_model_path": WithoutEffect((), _DECODER_ONLY),
    "multimodal_model_path": WithoutEffect((), _DECODER_ONLY),
    "max_num_images": WithoutEffect((), _DECODER_ONLY),
    "gpu_device_ids": WithoutEffect(
        (), f"{_ONE_DEVICE}, the first one that CUDA_VISIBLE_DEVICES leaves"
    ),
    "participant_ids": WithoutEffect((), _ONE_DEVICE),
    "num_nodes": WithoutEffect((1,), _ONE_DEVICE),
    "gpu_weights_percent": WithoutEffect(
        (1.0,), "weights are all on the device; weight-only builds make them smaller"
    ),
    "medusa_choices": WithoutEffect((), _OWN_SPECULATION),
    "eagle_choices": WithoutEffect((), _OWN_SPECULATION),
    "lookahead_window_size": WithoutEffect(
        (), "one continuation is guessed at a time, lookahead_ngram_size - 1 long"
    ),
    "lookahead_verification_set_size": WithoutEffect((), "one continuation is guessed at a time"),
    "speculative_decoding_fast_logits": WithoutEffect((False,), _OWN_SPECULATION),
    "kv_cache_onboard_blocks": WithoutEffect(
        (True,), "blocks in host memory are always brought back to be read"
    ),
    "cancellation_check_period_ms": WithoutEffect(
        (100,), "a cancelled request stops before the next step"
    ),
    "stats_check_period_ms": WithoutEffect((100,), _AT_ONCE),
    "iter_stats_max_iterations": WithoutEffect((1000,), _AT_ONCE),
    "request_stats_max_iterations": WithoutEffect((0,), _AT_ONCE),
    "enable_context_fmha_fp32_acc": WithoutEffect(
        (True, False), "attention always adds up in 32 bits"
    ),
    "multi_block_mode": WithoutEffect((True,), "attention is always spread over the whole device"),
    "cuda_graph_mode": WithoutEffect((True, False), "decode steps are always captured"),
    "cuda_graph_cache_size": WithoutEffect(
        (0,), "decode steps are captured once, for a ladder of batch sizes"
    ),
    "guided_decoding_backend": WithoutEffect(
        ("xgrammar", "llguidance"), "guided text has one implementation"
    ),
    "xgrammar_tokenizer_info_path": WithoutEffect(
        (), "the engine's own tokenizer says what its tokens spell"
    ),
}
