"""Rendered conversations equal those of transformers' apply_chat_template."""

import functools
import json

import pytest
import text_samples as samples

from slipstream.server.text.chat import (
    BrokenTemplate,
    ChatError,
    ContinueError,
    encode_chat,
    render_chat,
)
from slipstream.server.text.tokenizer import Tokenizer

CHATML = (
    "{%- for message in messages -%}\n    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim"
    " + '<|im_end|>' + '\\n' -}}\n{%- endfor -%}\n{%- if add_generation_prompt -%}\n"
    "    {{- '<|im_start|>assistant\\n' -}}\n{%- endif -%}\n"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
    {% set content = '<|im_start|>' + message['role'] + '<|tool|>\n\n' + message['content'] | trim + '<|im_end|>' %}
    {% if loop.index0 == 0 %}
        {% set content = bos_token + content %}
    {% endif %}
    {{ content }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant<|tool|>\n\n' }}
{% endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """\
{%- macro describe(tool, depth=0) -%}
    {{- tool.function.name }}: {{ tool | tojson(indent=2) -}}
{%- endmacro -%}
{%- set ns = namespace(seen=0, last=messages | length - 1) -%}
{%- if tools %}
{{- "# Tools\n" }}
{%- for tool in tools %}{{- describe(tool) ~ "\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages[::-1] if message.role != 'system' %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- if message.content is string %}
        {{- '<|im_start|>' ~ message.role ~ ' ' ~ loop.index ~ '/' ~ loop.length ~ '\n' }}
        {%- generation %}{{- message.content.split('</think>')[-1].lstrip('\n') }}{% endgeneration %}
    {%- else %}
        {%- for part in message.content %}{{- part.text | default('-') }}{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}' }}
    {%- endfor %}
{%- else %}
    {{- 'unknown' }}
{%- endfor %}
{{- ns.seen }} {{ messages | map(attribute='role') | join(', ') }} {{ strftime_now('%Y') | length }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "tools": TOOLS,
}

CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hello <b>&'\" 日本 🎉"}],
    "spaces": [{"role": "user", "content": "  leading\nand trailing \n"}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nhm</think>\n4"},
        {"role": "user", "content": "Sure?"},
    ],
}
TOOL_LIST = [
    {"type": "function", "function": {"name": "add", "parameters": {"a": "<number>", "ü": [1, 2]}}}
]


@functools.cache
def folder_of(name: str):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    folder = samples.write_folder(f"chat_{name}", samples.byte_level_tokenizer(), config=config)
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    return folder


@functools.cache
def ours(name: str) -> Tokenizer:
    return Tokenizer.load(folder_of(name))


@functools.cache
def theirs(name: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder_of(name))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOL_LIST])
def test_rendered_text_and_tokens_equal_transformers(name, conversation, prompt, tools):
    messages = CONVERSATIONS[conversation]
    options = {"add_generation_prompt": prompt, "tools": tools}
    rendered = render_chat(ours(name), messages, **options)
    assert rendered == theirs(name).apply_chat_template(messages, tokenize=False, **options)
    ids = theirs(name).apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert encode_chat(ours(name), rendered) == ids


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["2 + 2 is", "  spaces \n", "", "Sure, <b>日本 "])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_the_final_message_is_continued_as_by_transformers(name, content, role):
    before = CONVERSATIONS["one"] if role == "assistant" else []
    messages = [*before, {"role": role, "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        expected = theirs(name).apply_chat_template(messages, tokenize=False, **options)
    except ValueError:
        with pytest.raises(ContinueError):
            render_chat(ours(name), messages, **options)
        return
    assert render_chat(ours(name), messages, **options) == expected
    assert expected.rstrip().endswith(content.strip())


def test_a_final_message_that_cannot_be_continued_is_refused():
    with pytest.raises(ContinueError, match="cannot be combined with add_generation_prompt"):
        render_chat(ours("chatml"), CONVERSATIONS["one"], continue_final_message=True)
    for messages in (
        [*CONVERSATIONS["one"], {"role": "assistant", "content": [{"type": "text"}]}],
        [*CONVERSATIONS["one"], {"role": "assistant"}],
    ):
        with pytest.raises(ContinueError, match="needs a final message whose content is text"):
            render_chat(
                ours("chatml"), messages, add_generation_prompt=False, continue_final_message=True
            )
    system = [{"role": "system", "content": "Be brief."}]
    with pytest.raises(ContinueError, match="the chat template leaves the final message out"):
        render_chat(
            ours("mistral"), system, add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_no_second_beginning_token_is_added_to_a_rendered_one(name):
    tokenizer = ours(name)
    rendered = render_chat(tokenizer, CONVERSATIONS["one"])
    assert encode_chat(tokenizer, rendered).count(tokenizer.bos_id) == 1
    assert tokenizer.encode(rendered, add_special_tokens=True).count(tokenizer.bos_id) == 1


def test_content_parts_and_tool_calls_are_rendered_as_by_transformers():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "add", "arguments": {"a": "<1>"}}],
        },
    ]
    expected = theirs("tools").apply_chat_template(messages, tokenize=False)
    assert render_chat(ours("tools"), messages, add_generation_prompt=False) == expected
    assert '"arguments": {"a": "<1>"}' in expected


def test_variables_of_a_request_reach_the_template():
    rendered = render_chat(
        ours("tools"), CONVERSATIONS["one"], variables={"enable_thinking": False}
    )
    assert rendered.endswith("<think></think>")
    assert not render_chat(ours("tools"), CONVERSATIONS["one"]).endswith("<think></think>")


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_variables_cannot_replace_reserved_names(name):
    with pytest.raises(ChatError, match=f"'{name}' cannot be given"):
        render_chat(ours("chatml"), CONVERSATIONS["one"], variables={name: "x"})


# --- files with a template ---


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        (
            {"tokenizer_config.json": {"chat_template": "config"}, "chat_template.jinja": "file"},
            "file",
        ),
        ({"chat_template.json": {"chat_template": "json"}}, "json"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "plain"},
                        {"name": "tool_use", "template": "with tools"},
                    ]
                }
            },
            "plain",
        ),
    ],
)
def test_template_is_found_in_each_file_that_may_hold_it(tmp_path, files, expected):
    samples.byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert render_chat(tokenizer, CONVERSATIONS["one"]) == expected
    with_tools = "with tools" if expected == "plain" else expected
    assert render_chat(tokenizer, CONVERSATIONS["one"], tools=TOOL_LIST) == with_tools


def test_missing_template_error_names_the_file_to_add():
    with pytest.raises(ChatError, match=r"has no chat template; put one .* chat_template.jinja"):
        render_chat(Tokenizer.load(samples.byte_level()), CONVERSATIONS["one"])


# --- errors in one line ---


def template(source: str, tmp_path) -> Tokenizer:
    samples.byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(source)
    return Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{% for %}", "is not valid at line 2: "),
        (
            "{{ messages[0].nothing.more }}",
            "failed: 'dict object' has no attribute 'nothing'",
        ),
        ("{{ messages[0].content + 1 }}", "failed: "),
        ("{% include 'other' %}", "failed: "),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ 'x' | unknown }}", "is not valid at line 1: No filter named 'unknown'"),
        ("{{ 'x' * 9999999 }}", "exceeds its limits: "),
    ],
)
def test_a_template_that_renders_no_conversation_is_broken(tmp_path, caplog, source, message):
    tokenizer = template(source, tmp_path)
    for _ in range(2):
        with pytest.raises(BrokenTemplate) as caught:
            render_chat(tokenizer, CONVERSATIONS["one"])
        assert str(caught.value).startswith(f"the chat template of this model {message}")
        assert str(caught.value).endswith(": this is an error of the server, not of the request")
        assert "\n" not in str(caught.value)
    assert caplog.text.count("the chat template of this model") == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no\nsystem role') }}", "failed: no system role"),
        ("{{ messages[0].nothing.more }}", "failed: 'dict object' has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ 'x' * 9999999 }}", "exceeds its limits: "),
    ],
)
@pytest.mark.parametrize("condition", ["messages | length > 2", "messages[0].role == 'system'"])
def test_a_template_that_renders_other_conversations_refuses_one(
    tmp_path, caplog, source, message, condition
):
    tokenizer = template("{% if " + condition + " %}" + source + "{% endif %}", tmp_path)
    with pytest.raises(ChatError) as caught:
        render_chat(tokenizer, CONVERSATIONS["system"])
    assert str(caught.value).startswith(f"the chat template {message}")
    assert "\n" not in str(caught.value)
    assert not caplog.text


def test_a_template_that_refuses_every_conversation_in_its_own_words_is_not_broken(tmp_path):
    tokenizer = template("{{ raise_exception('ask the vendor') }}", tmp_path)
    with pytest.raises(ChatError, match="the chat template failed: ask the vendor"):
        render_chat(tokenizer, CONVERSATIONS["one"])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], r"messages\[1\] has no 'role'"),
    ],
)
def test_invalid_messages_are_refused(messages, message):
    with pytest.raises(ChatError, match=message):
        render_chat(ours("chatml"), messages)


def test_the_conversation_is_not_changed_by_the_template(tmp_path):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(BrokenTemplate):
        render_chat(template("{{ messages.append(1) }}", tmp_path), messages)
    with pytest.raises(BrokenTemplate):
        render_chat(template("{{ messages[0].update(role='system') }}", tmp_path), messages)
    assert messages == [{"role": "user", "content": "x"}]
