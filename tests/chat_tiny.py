"""A byte-level tokenizer with chat tokens, and chat templates with and without generation marks."""

from __future__ import annotations

from functools import cache
from typing import Any

from finetune_tiny import make_text
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"

# what every role says, tools' calls included, between the same tokens
CHATML = """\
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# the same text, marked
MARKED = """\
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endgeneration %}\
{% else %}{{ m.content }}<|im_end|>{% endif %}
{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# no special token anywhere: a line is a turn
PLAIN = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""

# as reasoning models do: an earlier turn loses what the last one shows
REWRITES = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ALTERNATES = """\
{%- if messages[0].role != 'user' %}{{ raise_exception('the first turn must be of the user') }}{% endif %}\
{{- messages[0].content }}"""


@cache
def _trained(trim_offsets: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([make_text(0)], trainer)
    return tokenizer


def chat_tokenizer(template: str | None, *, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """300 tokens at most; with `trim_offsets`, a token's offsets leave out the white space in it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained(trim_offsets), eos_token="<eos>", additional_special_tokens=[START, END]
    )
    tokenizer.chat_template = template
    return tokenizer


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def contents() -> st.SearchStrategy[str]:
    """What somebody says: any characters, white space at the ends and several tokens a character included."""
    pieces = st.sampled_from(["the expert", " token", "\n", "  ", "é", "🙂", "assistant", ": ", "x"])
    return st.lists(pieces, max_size=6).map("".join)


def conversations() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Chats with at least one assistant turn, never the first; system, tool and consecutive turns occur."""
    turn = st.tuples(st.sampled_from(["user", "assistant", "tool", "assistant"]), contents()).map(lambda p: says(*p))
    first = st.tuples(st.sampled_from(["system", "user"]), contents()).map(lambda p: says(*p))
    last = contents().map(lambda text: says("assistant", text))
    after = st.lists(contents().map(lambda text: says("user", text)), max_size=1)
    return st.tuples(first, st.lists(turn, max_size=4), last, after).map(lambda p: [p[0], *p[1], p[2], *p[3]])
