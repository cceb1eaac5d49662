"""The canonical prefix: what counts as the same prompt, and what a turn costs."""

from __future__ import annotations

import base64
import json
import statistics
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_hooks.canonical import message_pieces
from litellm_hooks.prefix import BIG_PIECE, Prefix, SessionMemory, chat_prefix, text_prefix

USER = {"role": "user", "content": "What is in main.py?"}
ANSWER = {"role": "assistant", "content": "A function."}
MORE = {"role": "user", "content": "Rename it."}


def prefix_of(messages: list[Any], group: str = "m", **request: Any) -> Prefix:
    return chat_prefix(group, messages, request, SessionMemory())


def history(chars: int, messages: int, text: str = "a line of a tool's output, 42\n") -> list[dict[str, Any]]:
    body = (text * (chars // messages // len(text) + 1))[: chars // messages]
    roles = ("user", "assistant", "tool")
    return [{"role": roles[i % 3], "content": f"{i} {body}"} for i in range(messages)]


def test_next_turn_extends_the_chain() -> None:
    """A turn's keys are the first keys of the next turn."""
    first, second = prefix_of([USER]), prefix_of([USER, ANSWER, MORE])
    assert second.keys[: len(first.keys)] == first.keys
    assert len(set(second.keys)) == 3
    assert second.anchor == first.anchor


def test_edit_in_the_middle_changes_every_key_from_there_on() -> None:
    """A chain of keys stands for everything before each of them."""
    one = prefix_of([USER, ANSWER, MORE])
    other = prefix_of([USER, {**ANSWER, "content": "Two functions."}, MORE])
    assert one.keys[0] == other.keys[0]
    assert one.keys[1] != other.keys[1]
    assert one.keys[2] != other.keys[2]


def test_text_block_and_text_are_one() -> None:
    """A message counts as its text, in a block or not, with cache_control or not."""
    blocks = {"role": "user", "content": [{"type": "text", "text": USER["content"], "cache_control": {"type": "e"}}]}
    assert prefix_of([blocks]).keys == prefix_of([USER]).keys
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": USER["content"]}]}
    assert prefix_of([item]).keys == prefix_of([USER]).keys


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"name": "f"}]},
        {"system": "be brief"},
        {"instructions": "be brief"},
        {"reasoning_effort": "high"},
        {"reasoning": {"effort": "high"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"cache_salt": "a"},
        {"extra_body": {"cache_salt": "a"}},
        {"kv_transfer_params": {"lmcache.tag.tenant": "a"}},
        {"thinking": {"type": "enabled"}},
    ],
)
def test_what_stands_before_the_messages_is_part_of_every_key(change: dict[str, Any]) -> None:
    """Tools, system, effort, template switches and salt make another prefix; so does the group."""
    assert not set(prefix_of([USER, ANSWER], **change).keys) & set(prefix_of([USER, ANSWER]).keys)
    assert not set(prefix_of([USER], group="other").keys) & set(prefix_of([USER]).keys)


@pytest.mark.parametrize("change", [{"temperature": 0.2}, {"max_tokens": 9}, {"stream": True}, {"user": "me"}])
def test_what_no_template_prints_changes_nothing(change: dict[str, Any]) -> None:
    """Sampling parameters and the like are not part of the prefix."""
    assert prefix_of([USER], **change).keys == prefix_of([USER]).keys


def test_tools_cache_control_is_ignored_and_their_order_is_not() -> None:
    """A cache mark on a tool changes nothing; another order of tools is another prompt."""
    tools = [{"name": "a"}, {"name": "b"}]
    marked = [{"name": "a"}, {"name": "b", "cache_control": {"type": "ephemeral"}}]
    assert prefix_of([USER], tools=marked).keys == prefix_of([USER], tools=tools).keys
    assert prefix_of([USER], tools=tools[::-1]).keys != prefix_of([USER], tools=tools).keys


@pytest.mark.parametrize("form", ["text", "blocks", "system message", "same block"])
def test_billing_line_is_left_out(form: str) -> None:
    """Claude Code's per-request line does not make another prefix of every turn."""

    def turn(cch: str) -> Prefix:
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"
        if form == "text":
            return prefix_of([USER], system=f"{line}\nYou are an agent.")
        if form == "blocks":
            return prefix_of([USER], system=[{"type": "text", "text": line}, {"type": "text", "text": "You are."}])
        if form == "same block":
            return prefix_of([USER], system=[{"type": "text", "text": f"{line}\nYou are."}])
        return prefix_of([{"role": "system", "content": f"{line}\nYou are."}, USER])

    assert turn("abc").keys == turn("def").keys


def test_image_counts_as_its_content() -> None:
    """One image in OpenAI's, Anthropic's and the Responses envelope has one piece; another image has another."""
    data = base64.b64encode(bytes(range(256)) * 50).decode()
    forms = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
    ]
    assert {message_pieces({"role": "user", "content": [form]})[-1] for form in forms} == {data}
    one = prefix_of([{"role": "user", "content": [forms[0]]}])
    other = json.loads(json.dumps(forms[0]).replace(data[:100], data[100:200]))
    assert prefix_of([{"role": "user", "content": [other]}]).keys != one.keys
    assert one.size < 10_000


def test_root_is_the_first_message_after_the_system_prompt() -> None:
    """System and developer messages come before the root, so that they attract nothing."""
    system = {"role": "system", "content": "You are an agent."}
    prefix = prefix_of([system, {"role": "developer", "content": "x"}, USER, ANSWER])
    assert prefix.root == 2
    assert prefix.anchor == prefix.keys[2]


def test_memory_gives_the_same_keys_and_hashes_only_what_is_new() -> None:
    """With a session's memory a turn yields the keys it yields without, and hashes its new messages only."""
    memory = SessionMemory()
    turns = history(200_000, 40)
    for end in range(2, 41, 2):
        warm = chat_prefix("m", turns[:end], {}, memory)
        assert warm.keys == prefix_of(turns[:end]).keys
    assert memory.hashed == 40
    assert memory.reused == sum(range(2, 40, 2))


def test_memory_sees_an_edited_history() -> None:
    """A session whose history was cut or edited gets the keys of what it is now."""
    memory = SessionMemory()
    turns = history(50_000, 10)
    chat_prefix("m", turns, {}, memory)
    edited = [*turns[:4], {"role": "user", "content": "instead"}, *turns[5:7]]
    assert chat_prefix("m", edited, {}, memory).keys == prefix_of(edited).keys
    assert chat_prefix("m", turns, {}, memory).keys == prefix_of(turns).keys


def test_memory_is_bounded() -> None:
    """The memory holds no more messages than it was told, and forgets the oldest sessions."""
    memory = SessionMemory(max_messages=100)
    for number in range(50):
        chat_prefix("m", [{"role": "user", "content": f"session {number}"}, *history(1000, 9)], {}, memory)
    assert memory.messages <= 100
    assert len(memory) == 10


def test_big_pieces_differ_by_their_middle() -> None:
    """A long text that differs anywhere has another key when no memory helps."""
    text = "x" * (BIG_PIECE * 3)
    at = BIG_PIECE + 77
    assert (
        prefix_of([{"role": "user", "content": text}]).keys
        != prefix_of([{"role": "user", "content": text[:at] + "y" + text[at + 1 :]}]).keys
    )


def test_raw_prompt_is_cut_into_chunks() -> None:
    """A growing prompt of /v1/completions shares the keys of its whole chunks, and its anchor."""
    text = "".join(f"line {i}\n" for i in range(2000))
    short, long = text_prefix("m", text[:9000], {}), text_prefix("m", text, {})
    assert long.keys[:4] == short.keys[:4]
    assert long.anchor == short.anchor
    assert long.keys[4] != short.keys[4]


deep: Any = "leaf"
for _ in range(3000):
    deep = {"properties": deep}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{}],
        [None],
        [42, "text", ["x"]],
        [{"role": "wizard", "content": 7}],
        [{"role": None, "content": [None, 3, {"type": "hologram", "beam": [1, 2]}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        [{"role": "user", "content": "\ud800 half a pair"}],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": deep}}],
            }
        ],
        [{"role": "user", "content": deep}],
        [{"role": "user", "content": [1, 2, 3, 4, 5]}],
        [{"role": "user", "content": b"bytes"}],
    ],
    ids=range(15),
)
def test_malformed_messages_have_a_prefix(messages: list[Any]) -> None:
    """Whatever a client sends as messages, there are keys, and the same ones again."""
    assert prefix_of(messages).keys == prefix_of(messages).keys != []


def test_deep_tools_have_a_prefix() -> None:
    """Tools nested three thousand deep are routed."""
    assert prefix_of([USER], tools=[{"name": "f", "parameters": deep}]).keys


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
loose_messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "type"]), json_values),
    min_size=1,
    max_size=5,
)


@given(loose_messages)
def test_any_json_is_a_prompt(messages: list[Any]) -> None:
    """No JSON in the place of messages raises, and memory never changes an answer."""
    memory = SessionMemory()
    once = chat_prefix("m", messages, {}, memory)
    assert chat_prefix("m", messages, {}, memory) == once


TEXTS = st.text(max_size=40) | st.sampled_from(
    ["x" * (BIG_PIECE + 1), "ж" * 1025, "ж" * 1024, "y" * BIG_PIECE, "\ud83d"]
)
usual_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS | st.none()},
    optional={"tool_call_id": TEXTS, "name": TEXTS, "tool_calls": st.lists(json_values | TEXTS, max_size=3)},
)


@given(st.lists(usual_messages, min_size=1, max_size=4))
def test_form_that_is_read_at_once_has_the_keys_of_any_other(messages: list[dict[str, Any]]) -> None:
    """A field without a value, which no template prints, takes a message out of the usual forms and changes nothing."""
    assert prefix_of([{**message, "refusal": None} for message in messages]) == prefix_of(messages)


def ratio_to_reading(messages: list[Any], memory: SessionMemory | None = None) -> float:
    """Time of a prefix over the time it takes json to read the same request: both scale with the machine."""
    text = json.dumps(messages)

    def median(work: Any) -> float:
        times = []
        for _ in range(15):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return median(lambda: chat_prefix("m", messages, {}, memory or SessionMemory())) / median(lambda: json.loads(text))


def test_prefix_costs_less_than_reading_the_request() -> None:
    """100 KB of history in 60 messages takes less time than parsing its JSON does."""
    assert ratio_to_reading(history(100_000, 60)) < 1.5


def test_ten_megabytes_are_routed_cheaply() -> None:
    """10 MB of text that is not ASCII takes a tenth of the time of parsing it, because it is sampled."""
    assert ratio_to_reading([{"role": "user", "content": "ж" * 5_000_000}]) < 0.2


FORMS = {
    "text": lambda i, text: [{"role": "user", "content": text}, {"role": "assistant", "content": text}],
    "OpenAI's tools": lambda i, text: [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": "read", "arguments": json.dumps({"p": text})}}
        ]},
        {"role": "tool", "tool_call_id": f"c{i}", "content": text},
    ],
    "Anthropic's blocks": lambda i, text: [
        {"role": "assistant", "content": [
            {"type": "text", "text": "I read."}, {"type": "tool_use", "id": f"c{i}", "name": "R", "input": {"p": text}}
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": f"c{i}", "content": [{"type": "text", "text": text}]}
        ]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_long_session_that_nobody_knows_is_read_in_little_time(form: str) -> None:
    """As after a restart: 3,000 messages in any form take at most four times what parsing their JSON takes."""
    turns = [message for i in range(1500) for message in FORMS[form](i, f"{i} " + "words of a history " * 17)]
    assert ratio_to_reading([USER, *turns]) < 4.0


def test_sessions_of_one_first_question_are_remembered_apart() -> None:
    """Two sessions that differ from their first answer on take turns, and each has only its new messages hashed."""
    memory = SessionMemory()
    turns = {name: [USER, {"role": "assistant", "content": name}, *history(3000, 9)] for name in ("one", "other")}
    for end in range(2, 11):
        for messages in turns.values():
            assert chat_prefix("m", messages[:end], {}, memory) == prefix_of(messages[:end])
    assert memory.hashed == 20


def test_memory_makes_big_messages_cheaper() -> None:
    """With the session's memory a turn over big messages is cheaper than without: they are not hashed again."""
    turns = [{"role": "user", "content": f"{i} " + "жизнь " * 15_000} for i in range(12)]
    memory = SessionMemory()
    chat_prefix("m", turns, {}, memory)
    assert ratio_to_reading(turns, memory) < 0.5 * ratio_to_reading(turns)


def test_memory_makes_many_small_messages_cheaper() -> None:
    """With the session's memory a turn after thousands of small messages is recognised at once, tool calls included."""
    turns: list[dict[str, Any]] = []
    for i in range(1000):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "read", "arguments": f'{{"path": "{i}"}}'}}
        turns += [
            {"role": "user", "content": f"{i} " + "words " * 50},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{i}", "content": f"{i} " + "found " * 50},
        ]
    memory = SessionMemory()
    for _ in range(2):
        chat_prefix("m", turns, {}, memory)
    assert ratio_to_reading(turns, memory) < 0.3 * ratio_to_reading(turns)


@given(st.data())
def test_memory_of_many_messages_changes_no_key(data: st.DataObject) -> None:
    """Whatever is edited, cut off or added between turns, the chain is the one a fresh memory makes."""
    memory = SessionMemory()
    turns: list[Any] = [{"role": ("user", "assistant")[i % 2], "content": f"message {i}"} for i in range(16)]
    turn = st.tuples(
        st.sampled_from(["edit", "cut", "add", "mark", "odd"]), st.integers(min_value=1, max_value=30), st.booleans()
    )
    for kind, at, append in data.draw(st.lists(turn, min_size=1, max_size=6)):
        place = min(at, len(turns) - 1)
        if kind == "edit":
            turns[place] = {**turns[place], "content": f"edited {at}"}
        elif kind == "cut":
            del turns[max(place, 2) :]
        elif kind == "mark":
            turns[place] = {**turns[place], "cache_control": {"type": "ephemeral"}}
        elif kind == "odd":  # what JSON does not know
            turns[place] = {**turns[place], "content": [{"type": "text", "text": "t", "extra": object}]}
        if append:
            turns += [{"role": "user", "content": f"added {at} {i}"} for i in range(at)]
        assert chat_prefix("m", turns, {}, memory) == chat_prefix("m", turns, {}, SessionMemory())
