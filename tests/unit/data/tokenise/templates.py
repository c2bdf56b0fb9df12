"""Chat templates with the traits of those that models ship: each does one or two things that hide the assistant."""

_CALLS = (
    "{% for call in message.tool_calls or [] %}{% set call = call.function or call %}"
    "{{ '<call>' + call.name + ' ' + (call.arguments | tojson) + '</call>' }}{% endfor %}"
)
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

DROPS_THOUGHTS = (
    """{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = (message.content or '') | trim -%}
{%- set thought = message.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim -%}
{%- set content = content.split('</think>')[-1] | trim -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>\n' + thought + '\n</think>\n\n' -}}
{%- endif -%}
{{- content -}}"""
    + _CALLS
    + """{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n<think>\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""
)
"""Thoughts only after the last user's message; the generation prompt opens one (or closes it: enable_thinking)."""

NO_HEADER_AFTER_TOOLS = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '<|user|>' + message.content }}{% endif %}"
    "{% if message.role == 'tool' %}{{ '<|result|>' + message.content + '<|done|>' }}{% endif %}"
    "{% if message.role == 'assistant' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|assistant|>' }}{% endif %}"
    "{{ (message.content or '').split('</think>')[-1] }}" + _CALLS + "{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
"""Thoughts are dropped everywhere, and the generation prompt opens one; no header after a tool's result."""

CHANNELS = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% if message.thinking and loop.last %}"
    "{{ '<|start|>assistant<|channel|>thought<|message|>' + message.thinking + '<|end|>' }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function or call %}"
    "{{ '<|start|>assistant to=' + call.name + '<|channel|>tool<|message|>' + (call.arguments | tojson) + '<|call|>' }}"
    "{% endfor %}"
    "{% if not message.tool_calls %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% endif %}"
    "{% elif message.role == 'tool' %}"
    "{% set call = loop.previtem.tool_calls[0] %}"
    "{{ '<|start|>' + (call.function or call).name + '<|channel|>tool<|message|>' + message.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""Channels in messages of their own; the last end token is another one; a tool's result repeats the function's name."""

NO_END_TOKEN = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' }}"
    "{% if message.role == 'assistant' %}{{ '<think></think>' + ('\n' if message.content.strip() else '') }}{% endif %}"
    "{{ message.content | trim }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A turn ends where the next one begins; something around words is left out where there are none."""

ONLY_TEXTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}" + _ASK
)
"""Contents as strings, and no tool calls."""

ONLY_PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + _ASK
)
"""Contents in parts alone."""

ARGUMENTS_AS_ITEMS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.name }}"
    "{% for name, value in call.function.arguments.items() %}{{ ' ' + name + '=' + value | string }}{% endfor %}"
    "{{ '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + _ASK
)
"""Arguments must be objects."""

SPLITS_A_TURN = (
    "{% for message in messages %}{% if message.role != 'tool' %}{{ '<|im_start|>' + message.role + '\n' }}"
    + _CALLS
    + "{% if message.tool_calls %}{{ '<|result|>' + messages[loop.index0 + 1].content + '<|done|>' }}{% endif %}"
    "{{ (message.content or '') + '<|im_end|>\n' }}{% endif %}{% endfor %}" + _ASK
)
"""A tool's result within the assistant's turn, before its words."""

MARKERS_IN_A_COMMENT = "{# {% generation %} would be here #}" + ONLY_TEXTS

ENDS_THE_CONVERSATION = ONLY_TEXTS.replace(
    _ASK, "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}" + _ASK
)
"""One more token where the conversation ends."""

TOKENS = tuple(
    "<|endoftext|> <|im_start|> <|im_end|> <|user|> <|assistant|> <|result|> <|done|> <|start|> <|channel|> "
    "<|message|> <|end|> <|call|> <|return|>".split()
)
"""Special tokens of all of them."""
