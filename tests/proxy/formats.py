"""Requests as the official clients build them; `rig` has those clients as `openai` and `anthropic`."""

from __future__ import annotations

from typing import Any

from .conftest import session


def chat(rig: Any, text: str, turns: int, stream: bool) -> None:
    messages: Any = session(text, turns)
    answer = rig.openai.chat.completions.create(model="coder", messages=messages, stream=stream)
    if stream:
        assert list(answer)


def completions(rig: Any, text: str, turns: int, stream: bool) -> None:
    prompt = "\n".join(message["content"] for message in session(text, turns)[1:])
    answer = rig.openai.completions.create(model="coder", prompt=prompt, stream=stream)
    if stream:
        assert list(answer)


def responses(rig: Any, text: str, turns: int, stream: bool) -> None:
    items: Any = session(text, turns)[1:]
    answer = rig.openai.responses.create(model="coder", instructions="Be brief.", input=items, stream=stream)
    if stream:
        assert list(answer)


def messages(rig: Any, text: str, turns: int, stream: bool) -> None:
    body: Any = {"model": "coder", "max_tokens": 8, "system": "Be brief.", "messages": session(text, turns)[1:]}
    if stream:
        with rig.anthropic.messages.stream(**body) as events:
            assert events.get_final_text()
    else:
        assert rig.anthropic.messages.create(**body).content


def claude_code(turns: int, cch: str, marker: str) -> dict[str, Any]:
    """A turn as Claude Code sends it: a billing line that changes, cache marks, tools, tool calls and their results."""
    mark = {"cache_control": {"type": "ephemeral"}}
    schema = {"type": "object", "properties": {"p": {"type": "string"}}}
    tools = [
        {"name": name, "description": f"{name} " * 100, "input_schema": schema}
        for name in ("Bash", "Read", "Edit")
    ]  # fmt: skip
    history: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": f"<system-reminder>x</system-reminder> session {marker} "}],
        }
    ]
    for turn in range(turns):
        use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read", "input": {"p": f"file{turn}.py"}}
        result = {
            "type": "tool_result",
            "tool_use_id": f"toolu_{turn}",
            "content": [{"type": "text", "text": "line\n" * 300}],
        }
        history += [
            {"role": "assistant", "content": [{"type": "text", "text": "I read it."}, use]},
            {"role": "user", "content": [result]},
        ]
    history[-1]["content"][-1].update(mark)
    return {
        "model": "coder",
        "max_tokens": 8,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.42; cc_entrypoint=cli; cch={cch};"},
            {"type": "text", "text": "You are Claude Code. " * 200, **mark},
        ],
        "tools": tools,
        "messages": history,
    }
