"""Dialogues in each family's format, by transformers.

The templates are our own, as short as the published formats allow, so that they may stand here;
texts.py compares the families' own where they are installed.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent

_LLAMA = (
    "{% for m in rest %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    "{{ header('assistant') ~ '{\"name\": \"' ~ call.name ~ '\", \"parameters\": '"
    " ~ call.arguments | tojson ~ '}<|eot_id|>' }}{% elif m.role == 'tool' %}"
    "{{ header('ipython') ~ m.content | tojson ~ '<|eot_id|>' }}{% else %}"
    "{{ header(m.role) ~ m.content | trim ~ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ header('assistant') }}{% endif %}"
)
_HEADER = "{% macro header(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}"
_QWEN_SYSTEM = (
    "{% if tools %}{{ '<|im_start|>system\n' ~ system ~ '\n\n# Tools\n\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{% elif system %}{{ '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' }}{% endif %}"
)
_QWEN_CALLS = (
    '{% for call in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' ~ call.function.name'
    " ~ '\", \"arguments\": ' ~ call.function.arguments | tojson ~ '}\n</tool_call>' }}{% endfor %}"
)
_QWEN_RESULT = (
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}{{ '\n<tool_response>\n' ~ m.content"
    " ~ '\n</tool_response>' }}"
    "{% if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
)
_QWEN_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = DEFAULT %}{% set rest = messages %}"
    "{% endif %}" + _QWEN_SYSTEM
)
_GEMMA_TURNS = (
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}{{ '<start_of_turn>'"
    " ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (system if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_THINKING = (  # reasoning and what follows it, wherever the message keeps them
    "{% set ns.thought = m.reasoning_content or '' %}{% set ns.said = m.content or '' %}"
    "{% if not ns.thought and '</think>' in ns.said %}"
    "{% set ns.thought = ns.said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set ns.said = ns.said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)

TEMPLATES = {
    "llama3": _HEADER + "{{ bos_token }}{% set rest = messages %}" + _LLAMA,
    "llama3.1": (
        _HEADER
        + "{{ bos_token }}{% if messages[0].role == 'system' %}"
        + "{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}{% else %}"
        + "{% set system = '' %}{% set rest = messages %}{% endif %}{{ header('system') }}"
        + "{{ ('Environment: ipython\n' if tools else '') ~ 'Today Date: '"
        + " ~ (date_string if date_string is defined else strftime_now('%d %b %Y')) ~ '\n\n' }}"
        + "{% for tool in tools or [] %}{{ tool | tojson(indent=4) ~ '\n\n' }}{% endfor %}"
        + "{{ system ~ '<|eot_id|>' }}"
        + _LLAMA
    ),
    "mistral": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
        "{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}{% if loop.last and tools %}"
        "{{ '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] '"
        " ~ (system ~ '\n\n' if loop.last and system is defined else '') ~ m.content ~ '[/INST]' }}"
        "{% elif m.tool_calls %}{{ '[TOOL_CALLS] ' ~ m.tool_calls | map(attribute='function')"
        " | list | tojson ~ eos_token }}{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] '"
        " ~ {'content': m.content} | tojson ~ '[/TOOL_RESULTS]' }}{% elif m.role == 'assistant' %}"
        "{{ ' ' ~ m.content | trim ~ eos_token }}{% else %}"
        "{{ raise_exception('no such role: ' ~ m.role) }}{% endif %}{% endfor %}"
    ),
    "qwen2.5": (
        _QWEN_FIRST.replace("DEFAULT", "'You are a helpful assistant.'")
        + "{% for m in rest %}{% if m.role == 'tool' %}"
        + _QWEN_RESULT
        + "{% else %}{{ '<|im_start|>' ~ m.role }}{% if m.content or not m.tool_calls %}"
        + "{{ '\n' + m.content }}{% endif %}"
        + _QWEN_CALLS
        + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen3": (  # reasoning is kept after the last question only
        "{% set ns = namespace(last=-1, thought='', said='') %}"
        + _QWEN_FIRST.replace("DEFAULT", "''")
        + "{% for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        + "{% endfor %}{% for m in rest %}{% if m.role == 'tool' %}"
        + _QWEN_RESULT
        + "{% elif m.role == 'assistant' %}"
        + _THINKING
        + "{{ '<|im_start|>assistant\n' }}"
        + "{% if loop.index0 > ns.last and (loop.last or ns.thought) %}"
        + "{{ '<think>\n' ~ ns.thought.strip('\n') ~ '\n</think>\n\n' }}{% endif %}{{ ns.said }}"
        + _QWEN_CALLS
        + "{{ '<|im_end|>\n' }}{% else %}"
        + "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        + "{% if enable_thinking is defined and not enable_thinking %}"
        + "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
    ),
    "qwen3-marked": (  # for training: reasoning stays, and what the assistant writes is marked
        "{% set ns = namespace(thought='', said='') %}"
        + _QWEN_FIRST.replace("DEFAULT", "''")
        + "{% for m in rest %}{% if m.role == 'tool' %}"
        + _QWEN_RESULT
        + "{% elif m.role == 'assistant' %}"
        + _THINKING
        + "{{ '<|im_start|>assistant\n' }}{% generation %}"
        + "{% if ns.thought %}{{ '<think>\n' ~ ns.thought ~ '\n</think>\n\n' }}{% endif %}"
        + "{{ ns.said }}"
        + _QWEN_CALLS
        + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
        + "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "gemma2": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{% set system = '' %}"
        "{% set rest = messages %}" + _GEMMA_TURNS
    ),
    "gemma3": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set text = messages[0].content %}"
        "{% set system = (text if text is string else text[0].text) ~ '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
        "{% endif %}" + _GEMMA_TURNS
    ),
    "gemma4": (  # reasoning is kept after the last question only
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ bos_token }}"
        "{% if tools or messages[0].role == 'system' %}{{ '<|turn>system\n' }}"
        "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}"
        "{% for tool in tools or [] %}{{ '<|tool>declaration:' ~ tool.function.name"
        " ~ '{description:<|\"|>' ~ tool.function.description ~ '<|\"|>}<tool|>' }}{% endfor %}"
        "{{ '<turn|>\n' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<|tool_response>response:' ~ (m.name or 'unknown') ~ '{value:<|\"|>' ~ m.content"
        " ~ '<|\"|>}<tool_response|>' }}{% elif m.role != 'system' %}"
        "{{ '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}"
        "{% set thought = m.reasoning or m.reasoning_content %}"
        "{% if thought and loop.index0 > ns.last %}"
        "{{ '<|channel>thought\n' ~ thought ~ '\n<channel|>' }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ '<|tool_call>call:' ~ call.function.name ~ '{' }}"
        "{% for key, value in call.function.arguments | dictsort %}{{ key ~ ':' ~ value"
        " ~ ('' if loop.last else ',') }}{% endfor %}{{ '}<tool_call|>' }}{% endfor %}"
        "{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for part in m.content or [] %}"
        "{{ part.text | trim if part.type == 'text' else '<|' ~ part.type ~ '|>' }}{% endfor %}"
        "{% endif %}{{ '' if m.tool_calls else '<turn|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
    ),
    "deepseek-r1": (  # reasoning is opened by the prompt and dropped from every turn
        "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endfor %}{{ bos_token ~ ns.system }}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' ~ m.content }}"
        "{% elif m.role == 'tool' %}"
        "{{ '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' }}"
        "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' ~ (m.content or '')"
        ".split('</think>')[-1] ~ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
    ),
}

_ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "ü < 3"}}}
_MUL = {"type": "function", "function": {"name": "mul", "arguments": {}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f'{name}s two numbers: a & b, "exactly", ü',
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
    for name in ("add", "mul")
]


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "question": [_user("What is 2 + 3?")],
    "system": [_system(" Be <brief> & kind. "), _user("Hi")],
    "turn": [_user("Hi"), _assistant("Hello! 😀")],
    "turns": [
        _system("Answer in one word."),
        _user("  Capital of France?\n"),
        _assistant(" Paris. "),
        _user("Und von Österreich?"),
        _assistant("Wien"),
        _user("Danke"),
    ],
    "thinking": [
        _user("1 + 1?"),
        _assistant("2", reasoning_content="one and\n\none"),
        _user("2 + 2?"),
        _assistant("4", reasoning_content="two and two"),
    ],
    "thinking in the text": [
        _user("1 + 1?"),
        _assistant("<think>\none and one\n</think>\n\n2"),
        _user("2 + 2?"),
        _assistant("<think>\ntwo and two\n</think>\n\n4", thinking="twice two"),
    ],
    "tools": [
        _system("Use tools."),
        _user("2 + 3?"),
        _assistant(None, tool_calls=[_ADD]),
        {"role": "tool", "content": "5", "name": "add"},
        _assistant("It is 5."),
        _user("Sure?"),
        _assistant("Yes."),
    ],
    "two calls": [
        _user("2 + 3, then 2 · 3?"),
        _assistant("Both.", tool_calls=[_ADD, _MUL], reasoning="add, then multiply"),
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": '{"product": 6}'},
        _assistant("5 and 6."),
    ],
    "parts": [_user([{"type": "text", "text": " look "}, {"type": "image"}]), _assistant("Nice.")],
    "assistant first": [_assistant("Hello, what can I do?"), _user("Nothing.")],
}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
WITH_TOOLS = ("question", "tools", "two calls")
# How a dialogue is rendered: as it stands, opening a turn, going on with the last one.
MODES: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"continue_final_message": True},
]


def written(tokenizer: Any, template: str, messages: list[Any], **options: Any) -> str | None:
    """transformers' text, None where it refuses."""
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **{**VARIABLES, **options}
        )
    except Exception:  # each template has its own
        return None


def rows(tokenizer: Any, template: str) -> list[dict[str, Any]]:
    """All renderings by one template."""
    return [
        {
            "dialogue": name,
            "tools": bool(tools),
            **mode,
            "text": written(tokenizer, template, messages, tools=tools, **mode),
        }
        for name, messages in DIALOGUES.items()
        for tools in ([None, TOOLS] if name in WITH_TOOLS else [None])
        for mode in MODES
        if "enable_thinking" not in mode or "enable_thinking" in template
    ]


def marked(tokenizer: Any, name: str) -> dict[str, Any]:
    """transformers' ids and mask of what the template marks."""
    out = tokenizer.apply_chat_template(
        DIALOGUES[name],
        chat_template=TEMPLATES["qwen3-marked"],
        tools=TOOLS if name in WITH_TOOLS else None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return {"dialogue": name, "ids": out["input_ids"], "mask": out["assistant_masks"]}


def chats_table() -> dict[str, Any]:
    """What every template writes of every dialogue."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny-tied")
    return {
        "templates": TEMPLATES,
        "dialogues": DIALOGUES,
        "tools": TOOLS,
        "variables": VARIABLES,
        "rows": {name: rows(tokenizer, template) for name, template in TEMPLATES.items()},
        "marked": [marked(tokenizer, name) for name in ("turn", "thinking", "tools", "two calls")],
    }
