"""Chat templates that use what real ones use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["CHATML", "PLAIN", "STRICT", "TOOLS", "add_chat_files"]

PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

# System message, thoughts, tools and their answers, lists of text parts, a switch.
CHATML = """\
{%- macro words(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_question=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last_question = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- words(messages[0].content) + '\\n\\n' }}{%- endif %}
    {{- 'Functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not tools %}{{- '<|im_start|>system\\n' + words(message.content) + '<|im_end|>\\n' }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<response>' + words(message.content) + '</response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last_question %}
            {{- '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}
        {{- words(message.content) if message.content is defined else '' }}
        {%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<call>' + call.function.name + ' ' }}
            {{- call.function.arguments | tojson(indent=2) if call.function.arguments is mapping
                else call.function.arguments }}
            {{- '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + words(message.content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Roles must take turns; texts are trimmed; a beginning mark; the date.
STRICT = """\
{{ bos_token }}[{{ strftime_now('%Y') | length }}]
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must take turns, found ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- ' [INST] ' + message.content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{% if documents %}
{{ documents | map(attribute='title') | join(', ') }}
{% endif %}
"""

TOOLS = "{{ tools | tojson }}|{% for message in messages %}{{ message.content }}{% endfor %}"


def add_chat_files(folder: Path, chat_template: Any, *, is_file: bool = False) -> None:
    """Put a template beside a folder's tokenizer.json, in the configuration or as a file."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|end|>",
        "eos_token": {"content": "<|end|>", "__type": "AddedToken"},
    }
    if is_file:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    else:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
