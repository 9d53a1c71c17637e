"""A chat as tokens, and which of them the assistant says.

A template that marks what the assistant generates ({% generation %}) says so itself. Of any other, the mask is
derived by rendering the conversation up to each assistant turn, with the generation prompt, and once more with
the turn: what the second text has and the first has not, is what the assistant has to learn to write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from torch_nvfp4.train.config import FinetuneError, one_line

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # characters of the rendered text: [start, end)
Message = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """Tokens of one sample, and for each whether it is learnt.

    Attributes:
        where: what to call the sample in an error.
    """

    where: str
    tokens: list[int]
    trained: list[bool]


def chat_sample(tokenizer: Any, where: str, fields: dict[str, Any], *, template: str | None, train_on: str) -> Sample:
    """Render and tokenise a chat.

    Args:
        where: what to call it in an error.
        fields: `messages`, and perhaps `tools`.
        template: a chat template in place of the tokenizer's own.
        train_on: "assistant" (its turns, end-of-turn token included, without the prompt before them) or "all".

    Raises:
        FinetuneError: there is no template, it refuses the chat, or it does not say what the assistant adds.
    """
    messages, tools = fields["messages"], fields.get("tools") or None
    render = partial(_render, tokenizer, _template(tokenizer, where, template, tools), where, tools)
    if train_on == "all":
        text, _ = render(messages)
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return Sample(where, list(tokens), [True] * len(tokens))
    if not tokenizer.is_fast:
        raise FinetuneError(
            "this tokenizer does not say which characters a token stands for (it is not a fast one), so the "
            "assistant's tokens cannot be told: save it with its tokenizer.json, or use --train-on all"
        )
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise FinetuneError(f"{where} has no assistant turn to learn from (roles: {roles})")
    text, spans = render(messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    if spans is not None:
        return Sample(where, tokens, tokens_in(offsets, spans))
    turns = [
        _until_end_of_turn(tokenizer, tokens, tokens_in(offsets, [span]))
        for span in _turn_spans(where, render, messages, text)
    ]
    return Sample(where, tokens, [any(marks) for marks in zip(*turns, strict=True)])


def tokens_in(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token, whether it stands for a character of one of the spans.

    Some tokenizers leave white space out of a token's offsets, which makes a token of white space alone empty:
    such a token stands for the characters since the one before it ended.
    """
    result, reached = [], 0
    for start, end in offsets:
        first = start if start < end else reached
        reached = max(reached, end)
        result.append(any(max(first, begin) < min(end, stop) for begin, stop in spans))
    return result


def _template(tokenizer: Any, where: str, template: str | None, tools: Any) -> str:
    if template is not None:
        return template
    try:
        found: str = tokenizer.get_chat_template(None, tools)
    except ValueError as e:
        raise FinetuneError(
            f"{where} is a chat, and this tokenizer has no chat template to render it with: give "
            "--chat-template FILE, or use the instruction-tuned model's tokenizer"
        ) from e
    return found


def _render(
    tokenizer: Any, template: str, where: str, tools: Any, messages: Sequence[Message], prompt: bool = False
) -> tuple[str, list[Span] | None]:
    """(text, the spans that the template marks as generated, or None if it marks nothing)."""
    marked = bool(_MARKS.search(template))
    rendered: Any
    try:
        rendered = render_jinja_template(
            # a chat from a table has every key in every message, None where it means nothing
            conversations=[[{k: v for k, v in message.items() if v is not None} for message in messages]],
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=marked,
            **tokenizer.special_tokens_map,
        )
    except Exception as e:  # a template can raise anything, its own raise_exception included
        raise FinetuneError(f"{where}: the chat template refuses the conversation ({one_line(e)})") from e
    texts, spans = rendered
    return texts[0], [(start, end) for start, end in spans[0]] if marked else None


def _turn_spans(where: str, render: Any, messages: Sequence[Message], text: str) -> list[Span]:
    """What each assistant turn adds to the rendered text, the generation prompt excluded."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = render(messages[:number], prompt=True)
        after, _ = render(messages[: number + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise FinetuneError(
                f"{where}: the chat template writes the turns up to message {number + 1} differently when others "
                "follow, so what the assistant adds there cannot be told: mark it with {% generation %} in a "
                "--chat-template FILE, write that turn as the last of a sample, or use --train-on all"
            )
        spans.append((len(before), len(after)))
    return spans


def _until_end_of_turn(tokenizer: Any, tokens: Sequence[int], turn: list[bool]) -> list[bool]:
    """A turn without white space after its last special token: generation has ended by then."""
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    inside = [n for n, marked in enumerate(turn) if marked]
    kept = len(inside)
    while kept and tokens[inside[kept - 1]] not in special:
        if tokenizer.decode([tokens[inside[kept - 1]]]).strip():
            return turn
        kept -= 1
    dropped = set(inside[kept:]) if kept else set()  # without any special token, white space is what ends the turn
    return [marked and n not in dropped for n, marked in enumerate(turn)]
