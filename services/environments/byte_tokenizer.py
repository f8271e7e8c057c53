"""A tokenizer for any text that needs no file: a token is a byte. For the built-in model where real text is to be sent.

Ids 0 to 255 are the bytes of UTF-8; 256 `<|im_start|>`, 257 `<|im_end|>`, which ends a turn, 258 `<|endoftext|>`. The chat
template is ChatML, with tools described and called as Qwen's models have it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

SPECIAL: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_SPLIT: Final = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")

CHATML: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nTo call one, answer:\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class ByteTokenizer:
    """See the module's docstring."""

    eos_id: Final = 257
    eos_text: Final = "<|im_end|>"
    vocab_size: Final = 256 + len(SPECIAL)
    chat_template: Final = CHATML

    def encode(self, text: str) -> list[int]:
        """Bytes of the text; special tokens in it are recognised."""
        ids: list[int] = []
        for part in _SPLIT.split(text):
            if part in SPECIAL:
                ids.append(256 + SPECIAL.index(part))
            else:
                ids += part.encode("utf-8", "replace")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text, special tokens left out; bytes that are no UTF-8 read as U+FFFD."""
        try:
            found = bytes(ids)
        except ValueError:  # special tokens, or ids of no token, among them
            found = bytes(index for index in ids if 0 <= index < 256)
        return found.decode("utf-8", "replace")
