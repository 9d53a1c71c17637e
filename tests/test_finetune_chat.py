"""Chats as tokens: exactly what the assistant says is learnt, whatever the template."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import pytest
from chat_tiny import ALTERNATES, CHATML, END, MARKED, PLAIN, REWRITES, chat_tokenizer, contents, conversations, says
from hypothesis import given
from hypothesis import strategies as st

from torch_nvfp4.train.chat import Sample, chat_sample, tokens_in
from torch_nvfp4.train.config import FinetuneError

Message = dict[str, Any]


def sample(
    messages: list[Message],
    template: str | None,
    *,
    trim_offsets: bool = False,
    train_on: str = "assistant",
    **more: Any,
) -> Sample:
    tokenizer = chat_tokenizer(template, trim_offsets=trim_offsets)
    fields = {"messages": messages, **more}
    return chat_sample(tokenizer, "chat.jsonl line 7", fields, template=None, train_on=train_on)


def runs(found: Sample) -> list[str]:
    """The stretches of trained tokens, decoded."""
    decode = chat_tokenizer(None).decode
    pairs = groupby(zip(found.tokens, found.trained, strict=True), key=lambda pair: pair[1])
    return [decode([token for token, _ in stretch]) for trained, stretch in pairs if trained]


@given(conversations(), st.booleans())
def test_exactly_the_assistant_is_learnt(messages: list[Message], trim_offsets: bool) -> None:
    expected = [m["content"] + END for m in messages if m["role"] == "assistant"]
    derived = sample(messages, CHATML, trim_offsets=trim_offsets)
    assert runs(derived) == expected
    assert sample(messages, MARKED, trim_offsets=trim_offsets) == derived, "marked or derived, it is one mask"


@given(conversations())
def test_the_mask_of_marks_is_what_transformers_gives(messages: list[Message]) -> None:
    tokenizer = chat_tokenizer(MARKED)
    given = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    found = sample(messages, MARKED)
    assert (found.tokens, found.trained) == (given["input_ids"], [bool(mark) for mark in given["assistant_masks"]])


@given(conversations())
def test_a_prompt_and_what_is_learnt_are_what_generation_would_see(messages: list[Message]) -> None:
    tokenizer = chat_tokenizer(CHATML)
    found = sample(messages, CHATML)
    turn = max(n for n, m in enumerate(messages) if m["role"] == "assistant")
    prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)["input_ids"]
    assert found.tokens[: len(prompt)] == prompt
    assert not found.trained[len(prompt) - 1] and found.trained[len(prompt)]


@given(conversations(), st.sampled_from([CHATML, MARKED, REWRITES]))
def test_all_tokens_on_demand(messages: list[Message], template: str) -> None:
    found = sample(messages, template, train_on="all")
    assert all(found.trained)
    assert found.tokens == chat_tokenizer(template).apply_chat_template(messages)["input_ids"]


@given(st.lists(contents().filter(lambda text: text.strip()), min_size=1, max_size=3), st.booleans())
def test_without_special_tokens_the_end_of_line_ends_a_turn(answers: list[str], trim_offsets: bool) -> None:
    messages = [m for answer in answers for m in (says("user", "the"), says("assistant", answer))]
    assert runs(sample(messages, PLAIN, trim_offsets=trim_offsets)) == [f" {answer}\n" for answer in answers]


def test_tools_and_their_calls() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        says("user", "1 + 1"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        says("tool", "2"),
        says("assistant", "two"),
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for template in (CHATML, MARKED):
        found = sample(messages, template, tools=[tool])
        assert [re.sub(r"\s", "", text) for text in runs(found)] == [
            '[{"function":{"name":"add","arguments":{"a":1}}}]' + END, "two" + END,
        ]  # fmt: skip
        assert chat_tokenizer(None).decode(found.tokens).startswith("<|im_start|>tools\n[{")


def test_a_key_that_is_none_is_no_key() -> None:
    plain = [says("user", "a"), says("assistant", "b")]
    assert sample([m | {"tool_calls": None} for m in plain], CHATML) == sample(plain, CHATML)


def test_tokens_of_no_width_stand_for_what_lies_before_them() -> None:
    # "a", white space that the offsets leave out, "b"; then two tokens of one character
    offsets = [(0, 1), (3, 3), (3, 4), (4, 5), (4, 5), (5, 6)]
    assert tokens_in(offsets, [(1, 2)]) == [False, True, False, False, False, False]
    assert tokens_in(offsets, [(4, 5)]) == [False, False, False, True, True, False]
    assert tokens_in(offsets, [(2, 2)]) == [False] * 6


USER, ASSISTANT = says("user", "a"), says("assistant", "b")


@pytest.mark.parametrize(
    ("messages", "template", "text"),
    [
        ([USER], CHATML, "chat.jsonl line 7 has no assistant turn to learn from (roles: user)"),
        ([USER, says("gpt", "b")], CHATML,
         "chat.jsonl line 7 has no assistant turn to learn from (roles: user, gpt)"),
        ([USER, ASSISTANT], None,
         "chat.jsonl line 7 is a chat, and this tokenizer has no chat template to render it with: give "
         "--chat-template FILE, or use the instruction-tuned model's tokenizer"),
        ([USER, ASSISTANT, USER, ASSISTANT], REWRITES,
         "chat.jsonl line 7: the chat template writes the turns up to message 2 differently when others follow, "
         "so what the assistant adds there cannot be told: mark it with {% generation %} in a --chat-template "
         "FILE, write that turn as the last of a sample, or use --train-on all"),
        ([ASSISTANT, USER], ALTERNATES,
         "chat.jsonl line 7: the chat template refuses the conversation (the first turn must be of the user)"),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt_is_said(messages: list[Message], template: str | None, text: str) -> None:
    with pytest.raises(FinetuneError) as error:
        sample(messages, template)
    assert str(error.value) == text


def test_a_last_turn_alone_may_be_rewritten() -> None:
    assert runs(sample([USER, ASSISTANT], REWRITES)) == ["<think></think>b" + END]


def test_a_chat_template_given_replaces_the_tokenizers() -> None:
    fields = {"messages": [USER, ASSISTANT]}
    found = chat_sample(chat_tokenizer(REWRITES), "", fields, template=PLAIN, train_on="assistant")
    assert runs(found) == [" b\n"]


def test_a_tokenizer_without_offsets() -> None:
    class Slow:
        is_fast = False
        special_tokens_map: dict[str, str] = {}

        def get_chat_template(self, name: None, tools: None) -> str:
            return CHATML

        def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text]}

    fields = {"messages": [USER, ASSISTANT]}
    with pytest.raises(FinetuneError, match=r"it is not a fast one.*: save it with its tokenizer.json, or use --tra"):
        chat_sample(Slow(), "", fields, template=None, train_on="assistant")
    assert all(chat_sample(Slow(), "", fields, template=None, train_on="all").trained)
