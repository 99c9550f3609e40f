"""Good requests to the routes of OpenAI's and Anthropic's APIs, with as many fields as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# path, body, and the members of the body that stay as they are
GoodRequest = tuple[str, dict[str, Any], tuple[str, ...]]

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "s", "name": "n"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]
QUESTION = [{"role": "user", "content": "hi"}]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "seed": 5,
    "logit_bias": {"5": 1.0},
    "top_k": 3,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "bad_words": ["zz"],
    "truncate_prompt_tokens": 8,
    "allowed_token_ids": [5, 6, 7],
    "priority": 1,
    "cache_salt": "s",
}
SHARED = {
    **SAMPLING,
    "stop": ["qq"],
    "n": 1,
    "stream": False,
    "user": "u",
    "metadata": {"k": "v"},
    "include_stop_str_in_output": False,
    "truncation_side": "left",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "add_special_tokens": False,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "request_id": "r",
    "store": False,
}
FUNCTION_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
ITEMS = [
    {"role": "developer", "content": "s"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "r"}],
        "encrypted_content": "e",
    },
    FUNCTION_CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "7"},
]
CHAT = {"model": "chat", "messages": QUESTION, "max_completion_tokens": 2}
COMPLETION = {"model": "chat", "prompt": "hi", "max_tokens": 2}
RESPONSE = {"model": "chat", "input": "hi", "max_output_tokens": 16}
MESSAGES = {"model": "chat", "messages": QUESTION, "max_tokens": 2}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA, "description": "d"},
}
TAGS = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}

TEXT_ROUTES: Sequence[GoodRequest] = (
    (
        "/v1/chat/completions",
        {**CHAT, **SHARED, "messages": HISTORY, "logprobs": True, "top_logprobs": 2},
        (),
    ),
    (
        "/v1/chat/completions",
        {
            **CHAT,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "reasoning_effort": "low",
            "chat_template_kwargs": {"quietly": True},
            "documents": [{"title": "t", "text": "d"}],
            "add_generation_prompt": True,
            "continue_final_message": False,
        },
        ("model", "messages"),
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
        ("model", "messages"),
    ),
    (
        "/v1/chat/completions",
        {
            **CHAT,
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
        },
        ("model", "messages", "tools"),
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ("model", "messages", "tools"),
    ),
    ("/v1/chat/completions", {**CHAT, "response_format": FORMAT}, ("model", "messages")),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "structural_tag", **TAGS}},
        ("model", "messages"),
    ),
    (
        "/v1/completions",
        {**COMPLETION, **SHARED, "logprobs": 1, "echo": True, "best_of": 1},
        (),
    ),
    ("/v1/completions", {**COMPLETION, "prompt": ["a", "b"], "n": 2, "stream": True}, ("model",)),
    ("/v1/completions", {**COMPLETION, "prompt": [[5, 6], [7]], "best_of": 2}, ("model",)),
    *[
        ("/v1/completions", {**COMPLETION, "structured_outputs": guide}, ("model", "prompt"))
        for guide in (
            {"json": SCHEMA},
            {"regex": "a+"},
            {"choice": ["a", "b"]},
            {"grammar": 'root ::= "a"'},
            {"json_object": True},
            {"structural_tag": TAGS},
        )
    ],
    ("/v1/completions", {**COMPLETION, "guided_json": SCHEMA}, ("model", "prompt")),
    (
        "/v1/responses",
        {
            **RESPONSE,
            "input": ITEMS,
            "instructions": "i",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "metadata": {"k": "v"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "truncation": "auto",
            "temperature": 0.5,
            "top_p": 0.5,
            "store": False,
            "background": False,
            "max_tool_calls": 2,
            "user": "u",
        },
        (),
    ),
    (
        "/v1/responses",
        {
            **RESPONSE,
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
            "parallel_tool_calls": False,
            "stream": True,
            "stream_options": {"include_obfuscation": False},
        },
        ("model", "input"),
    ),
    (
        "/v1/responses",
        {**RESPONSE, "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        ("model", "input"),
    ),
    ("/v1/responses/input_tokens", RESPONSE, ()),
    (
        "/v1/messages",
        {
            **MESSAGES,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "text", "text": "a"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "7"}],
                },
            ],
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["qq"],
            "stream": False,
            "metadata": {"user_id": "u"},
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
        },
        (),
    ),
    (
        "/v1/messages",
        {**MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ("model", "messages"),
    ),
    ("/v1/messages/count_tokens", {"model": "chat", "messages": QUESTION, "system": "s"}, ()),
    ("/tokenize", {"model": "chat", "prompt": "hi", "return_token_strs": True}, ()),
    (
        "/tokenize",
        {
            "messages": HISTORY,
            "tools": [TOOL],
            "add_generation_prompt": False,
            "continue_final_message": False,
            "chat_template_kwargs": {"quietly": 1},
            "add_special_tokens": True,
        },
        (),
    ),
    ("/tokenize", {"content": "hi", "add_special": True, "with_pieces": True}, ()),
    ("/detokenize", {"model": "chat", "tokens": [5, 6]}, ()),
    (
        "/v1/load_lora_adapter",
        {"lora_name": "a", "lora_path": "/nowhere", "base_model_name": "chat"},
        (),
    ),
    ("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 1}, ()),
)
POOLING_ROUTES: Sequence[GoodRequest] = (
    (
        "/v1/embeddings",
        {
            "model": "pooler",
            "input": ["a", [5, 6]],
            "encoding_format": "float",
            "dimensions": 8,
            "truncate_prompt_tokens": 4,
            "user": "u",
        },
        (),
    ),
    (
        "/v1/rerank",
        {
            "model": "pooler",
            "query": "q",
            "documents": ["a", {"text": "b"}],
            "top_n": 1,
            "return_documents": True,
            "truncate_prompt_tokens": 9,
            "use_activation": True,
        },
        (),
    ),
    ("/score", {"text_1": "a", "text_2": ["b", "c"], "use_activation": True}, ()),
)
