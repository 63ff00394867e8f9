"""What the golden tables are made of: texts, word patterns, chat templates, dialogues."""

from typing import Any

TEXTS = [
    "",
    "Hello, world!",
    "The capital of France is Paris. It's the city's oldest part we'd love.",
    "don't DON'T we'll WE'LL they've I'm he'd",
    "1 12 123 1234 12345 3.14159 1,000,000 2+2=4 x2y",
    " leading, trailing ",
    "spaces   in    runs     and\ttabs\t\tand \t mixed",
    "lines\nof\n\ntext\r\nwith\n \n spaces\n\n\n",
    "    def f(x):\n        return x ** 2  # comment\n",
    "Grüße, naïve café; Ünïcödé ß ÀÉÎ",
    "e\u0301 decomposed and \u00e9 composed",
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום مرحبا",
    "emoji 😀 👩‍👩‍👧 🇫🇷 👍🏽 end",
    "½ ² ① Ⅷ ٣٤ १२३",
    "a\u00a0b\u2003c\u200bd\u3000e",
    '$100 <b>bold</b> {"key": [1, 2]} a|b ~c ^d `e` <=>',
    "<|im_start|>user\nHi<|im_end|>\n",
    "text <|im_end|> inside<|endoftext|>end",
    "<|im_start|><|im_start|>",
    "<|not_a_token|> <0x0A>",
    "\u0000\u0001\u007f\ufeff control",
    "https://example.org/path?q=a%20b&c=d#e",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]

# Whole words in one pattern, as the models' authors publish them; each cuts a text without a rest.
_LLAMA3_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3_START + r"|\p{N}{1,3}|" + _LLAMA3_END,
    "qwen2": _LLAMA3_START + r"|\p{N}|" + _LLAMA3_END,
    # Each digit alone; white space before a digit is not split.
    "smollm": (
        r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
        r"|\s+(?=\p{N})|\s+(?!\S)|\s+"
    ),
}

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
        "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "generation": (
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'assistant' %}\n"
        "        {{- '<|im_start|>assistant\n' }}\n"
        "        {%- generation %}\n"
        "            {{- message.content + '<|im_end|>' }}\n"
        "        {%- endgeneration %}\n"
        "        {{- '\n' }}\n"
        "    {%- else %}\n"
        "        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}\n"
    ).replace("{%- generation %}", "{% generation %}"),
    "tools": (
        "{{ bos_token }}{% if tools %}{% for tool in tools %}\n"
        "{{ tool | tojson }}\n{{ tool | tojson(indent=2) }}\n{% endfor %}{% endif %}\n"
        "{% for message in messages %}\n"
        "    {% if message.role == 'system' %}{% continue %}{% endif %}\n"
        "[{{ message.role | upper }}] {{ message.content | trim }}{{ eos_token }}\n"
        "    {% if loop.index > 5 %}{% break %}{% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}[ASSISTANT]{% endif %}\n"
    ),
    "namespace": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
        "{% endif %}{% for m in rest %}{{ m.role }}: {% if loop.first and system %}"
        "{{ system + ' | ' }}{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{{ ' (last question)' if loop.index0 == ns.last else '' }}\n{% endfor %}"
        "{{- 'assistant: ' if add_generation_prompt }}"
    ),
}

DIALOGUES: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}],
    [
        {"role": "system", "content": 'Answer in one word; "quote" & <tags> stay.'},
        {"role": "user", "content": "  Capital of France?  "},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Und von Österreich? 😀"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\nWien"},
    ],
]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": 'Adds two numbers: a & b, "exactly", ü',
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]

PROMPTS = [
    "What is the capital of France?",
    "What is 7 + 5?",
    "Write one sentence about the sea.",
    "Name three primary colors.",
]
