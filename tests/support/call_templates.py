"""Chat templates that show calls as those of real models do, shortened, and answers of them."""

from __future__ import annotations

from slipstream.server.openai.tools import call_formats

_START = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}"
_END = "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"

HERMES = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.parameters | length }}\n"
    '{% if loop.last %}Call <tool_call>{"name": N, "arguments": A}</tool_call>\n{% endif %}{% endfor %}'
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
LLAMA = (
    '{{ bos_token }}{% if tools %}{{ \'Say {"name": N, "parameters": P}.\' }}'
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {% if message.tool_calls %}"
    "{% set call = message.tool_calls[0].function %}{{ '{\"name\": \"' + call.name + '\", ' }}{{ '\"parameters\": ' }}"
    "{{ call.arguments | tojson }}{{ '}' }}{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
QWEN_CODER = (
    "{% for tool in tools or [] %}<function><name>{{ tool.function.name }}</name></function>{% endfor %}"
    "Reply: <tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "</function>\n</tool_call>"
    + _START
    + "{% for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}" + _END
)
# The arguments are joined to texts, so they must be text.
DEEPSEEK_V3 = (
    _START
    + "{% for tool in message['tool_calls'] or [] %}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + "
    "'<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + "
    "'```' + '<｜tool▁call▁end｜>'}}{% endfor %}" + _END
)
DEEPSEEK_V31 = (
    _START
    + "{% for tool in message['tool_calls'] or [] %}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ "
    "tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}{% endfor %}"
    + _END
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + _START
    + "{% if message.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{% endfor %}]{% endif %}"
    "{% if message.role == 'tool' %}{{ message.tool_call_id }}{% endif %}" + _END
)
MISTRAL_SPACED = MISTRAL.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
MISTRAL_NAMES = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + _START
    + "{% for call in message.tool_calls or [] %}{% set arguments = call.function.arguments %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments | tojson }}{% endfor %}" + _END
)
MISTRAL_WITH_IDS = MISTRAL_NAMES.replace("'[ARGS]'", "'[CALL_ID]' + call.id + '[ARGS]'")
HARMONY = (
    "{% if tools %}namespace functions { {% for tool in tools %}{{ '// ' + tool.function.description }}"
    "{{ tool.function.name }} {% endfor %} }{% endif %}"
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>"
    "{% for message in messages %}{% if message.tool_calls %}{% if message.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ message.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# shows neither tools nor calls
PLAIN = "{{ bos_token }}" + _START.removeprefix("{{ bos_token }}") + "{{ '\n' }}" + _END

# A format, its template, and an answer with text and calls of `weather` and `now`: as many as the
# format has in one answer.
FORMATS = {
    "hermes": (call_formats.HERMES, HERMES),
    "llama": (call_formats.LLAMA, LLAMA),
    "qwen_coder": (call_formats.QWEN_CODER, QWEN_CODER),
    "deepseek_v3": (call_formats.DEEPSEEK_V3, DEEPSEEK_V3),
    "deepseek_v31": (call_formats.DEEPSEEK_V31, DEEPSEEK_V31),
    "mistral": (call_formats.MISTRAL, MISTRAL),
    "mistral_spaced": (call_formats.MISTRAL_SPACED, MISTRAL_SPACED),
    "mistral_names": (call_formats.MISTRAL_NAMES, MISTRAL_NAMES),
    "mistral_with_ids": (call_formats.MISTRAL_WITH_IDS, MISTRAL_WITH_IDS),
    "harmony": (call_formats.HARMONY, HARMONY),
}
ARGUMENTS = '{"city": "Rome", "days": 2}'
ANSWERS = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}',
    "qwen_coder": "Let me see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n"
    "2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseek_v3": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Rome", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "mistral": 'Let me see.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 2}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral_spaced": 'Let me see.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 2}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral_names": 'Let me see.[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "mistral_with_ids": "Let me see.[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]"
    '{"city": "Rome", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "harmony": "<|channel|>analysis<|message|>Rome it is.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Rome", "days": 2}',
}
TEXT_AND_CALLS = ["Let me see.", ("weather", ARGUMENTS), ("now", "{}")]
PARTS = {
    **dict.fromkeys(ANSWERS, TEXT_AND_CALLS),
    "llama": [("weather", ARGUMENTS)],
    "harmony": [{"Rome it is."}, "Let me see.", ("weather", ARGUMENTS)],
}

# Shows reasoning, as templates of models that think do.
THINKING = (
    "{% for message in messages %}[{{ message.role }}] {% if message.reasoning_content %}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content }}\n{% endfor %}"
    "[assistant] {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
