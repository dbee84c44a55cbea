"""Chat templates with the habits of those that checkpoints bring: what they demand of messages, ids and arguments."""

__all__ = ["HERMES", "LLAMA3", "MISTRAL", "QWEN3"]

HERMES = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}
For each call return <tool_call>{"name": <function-name>, "arguments": <args-dict>}</tool_call><|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
<|im_start|>tool
<tool_response>{{ message.content }}</tool_response><|im_end|>
{%- else %}
<|im_start|>{{ message.role + '\\n' + message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}
{{- raise_exception('arguments must be an object') }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>
{%- endfor %}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

QWEN3 = """
{%- if tools %}<|im_start|>system
<tool_call></tool_call>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- if message.role == "assistant" %}
<|im_start|>assistant
{%- if message.reasoning_content is defined and message.reasoning_content is not none %}
<think>{{ message.reasoning_content.strip('\\n') }}</think>
{%- endif %}
{{ content }}
{%- for call in message.tool_calls or [] %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{%- elif message.role == "tool" %}
<|im_start|>user
<tool_response>{{ content }}</tool_response><|im_end|>
{%- else %}
<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{% endif %}"""

LLAMA3 = """
{%- if tools %}<|start_header_id|>system<|end_header_id|>
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{{- tools | tojson }}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>{"name": "' + tool_call.name + '", "parameters": ' }}
{{- (tool_call.arguments | tojson) + '}<|eot_id|>' + message.content }}
{%- else %}
{{- '<|start_header_id|>ipython<|end_header_id|>' }}
{%- if message.content is mapping %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"""

MISTRAL = """
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if not (message.role == "tool" or message.tool_calls is defined) %}
{%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
{{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message["role"] == "user" %}
{%- if tools is not none and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- "[INST]" + message["content"] + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- message["content"] + "[TOOL_CALLS][" }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- endfor %}]
{%- elif message["role"] == "assistant" %}
{{- " " + message["content"] | trim + eos_token }}
{%- elif message["role"] == "tool" %}
{%- if message.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
{%- else %}
{{- raise_exception("Only user and assistant roles are supported!") }}
{%- endif %}
{%- endfor %}"""
