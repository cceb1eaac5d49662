"""What a request's prompt is made of, in one form: the pieces that are hashed, whatever format they came in.

Two requests share a prefix here where a chat template would render the same leading tokens: text blocks count as their
text, `cache_control` and ids that no template prints are left out, an image or a file counts as its content. Nothing
is reordered, and the request itself is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

Piece = str
"""One span of prompt content. Text stays the object the request holds, so that naming it copies nothing."""

BILLING_LINE = "x-anthropic-billing-header:"
"""Claude Code puts a line with this name, and another value in every request, in front of its system prompt."""

MEDIA_CHARS = 4096

_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "thinking", "reasoning_text", "summary_text"})
_PLAIN_FIELDS = frozenset({"role", "content", "cache_control", "id", "status"})
_TEMPLATE_SWITCHES = (
    "reasoning_effort", "reasoning", "thinking", "output_config", "chat_template", "chat_template_kwargs", "documents",
    "add_generation_prompt", "tool_choice", "functions", "mm_processor_kwargs",
)  # fmt: skip
_ROOT_ROLES = frozenset({"system", "developer"})

_encoder = msgspec.json.Encoder(enc_hook=lambda value: str(type(value)))


class Media(str):
    """The content of an image, audio or file: hashed like text, but no token stands for four characters of it."""

    __slots__ = ()


def size_of(piece: Piece) -> int:
    """Characters a piece counts as; an image counts as what about a thousand tokens would be."""
    return MEDIA_CHARS if type(piece) is Media else len(piece)


def encoded(value: object) -> str:
    """JSON of any value, in the order it has; a value too deep or too odd for JSON counts as its kind and length."""
    try:
        return _encoder.encode(value).decode()
    except (RecursionError, ValueError, TypeError, OverflowError):
        size = len(value) if isinstance(value, list | dict | tuple | str) else 0
        return f"{type(value).__name__}/{size}"


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """A first turn asks this of thousands of blocks, nearly all of them plain dicts, and asking an ABC is slow."""
    return type(value) is dict or isinstance(value, Mapping)


def without_billing_line(text: str) -> str:
    """`text` without Claude Code's per-request line, which is its first; other text comes back as it is."""
    if not text.startswith(BILLING_LINE):
        return text
    _, _, rest = text.partition("\n")
    return rest


def _media_piece(block: Mapping[str, Any]) -> Media | None:
    """The content of an image, audio or file block: its base64 text or its address, without the envelope."""
    for key in ("image_url", "input_audio", "file", "source", "audio_url", "video_url"):
        inner = block.get(key)
        if isinstance(inner, str):
            return _payload(inner)
        if isinstance(inner, Mapping):
            for field in ("url", "data", "file_data", "file_id"):
                value = inner.get(field)
                if isinstance(value, str):
                    return _payload(value)
    for field in ("file_data", "file_id", "file_url"):
        value = block.get(field)
        if isinstance(value, str):
            return _payload(value)
    return None


def _payload(text: str) -> Media:
    """`data:image/png;base64,AAAA` and `AAAA` are one image."""
    if text.startswith("data:"):
        _, comma, rest = text.partition(",")
        return Media(rest if comma else text)
    return Media(text)


def _block_pieces(block: object, out: list[Piece], depth: int) -> None:
    if isinstance(block, str):
        if block:
            out.append(block)
        return
    if not _is_mapping(block):
        out.append(encoded(block))
        return
    kind = block.get("type")
    if kind == "text" and type(text := block.get("text")) is str:
        if text:
            out.append(text)
        return
    if kind is None or (type(kind) is str and kind in _TEXT_TYPES):
        text = block.get("text", block.get("thinking"))
        if isinstance(text, str):
            if text:
                out.append(text)
            return
    if kind == "tool_result" and depth < 4:
        out.append(str(block.get("tool_use_id")))
        content_pieces(block.get("content"), out, depth + 1)
        return
    media = None if kind == "tool_use" else _media_piece(block)
    if media is not None:
        out.append(str(kind))
        out.append(media)
        return
    if "cache_control" in block:
        block = {key: value for key, value in block.items() if key != "cache_control"}
    out.append(encoded(block))


def content_pieces(content: object, out: list[Piece], depth: int = 0) -> None:
    """Appends the pieces of a message's `content` in any of its forms (None, text, blocks, something else)."""
    if content is None:
        return
    if isinstance(content, str):
        if content:
            out.append(content)
    elif type(content) is list or (isinstance(content, Sequence) and not isinstance(content, bytes | bytearray)):
        if content and isinstance(content[0], int) and all(isinstance(item, int) for item in content[1:4]):
            out.append(encoded(content))  # token ids of a completion
            return
        for block in content:
            _block_pieces(block, out, depth)
    else:
        _block_pieces(content, out, depth)


def message_pieces(message: object) -> list[Piece]:
    """The pieces of one message or Responses item, its role first."""
    if isinstance(message, str):
        return ["user", message]
    if not _is_mapping(message):
        dump = getattr(message, "model_dump", None)
        plain = dump(exclude_none=True) if callable(dump) else None
        if not isinstance(plain, Mapping):
            return ["?", encoded(message)]
        message = plain
    role = message.get("role")
    out: list[Piece] = [role if type(role) is str else str(message.get("role", message.get("type", "?")))]
    content_pieces(message.get("content"), out)
    for key, value in message.items():
        if key in _PLAIN_FIELDS or value is None or (key == "type" and value == "message"):
            continue
        out.append(str(key))
        out.append(value if isinstance(value, str) else encoded(value))
    return out


def role_of(message: object) -> str:
    """The role that decides where the shared part ends; what carries none counts as the user's."""
    if isinstance(message, Mapping):
        return str(message.get("role", "user" if message.get("type") in (None, "message") else "?"))
    return str(getattr(message, "role", "user"))


def first_user(messages: Sequence[object]) -> int:
    """Index of the message that makes a session its own: the first that is neither system nor developer; -1 if none."""
    for index, message in enumerate(messages):
        if role_of(message) not in _ROOT_ROLES:
            return index
    return -1


def _system_pieces(system: object, out: list[Piece]) -> None:
    blocks: list[Piece] = []
    content_pieces(system, blocks)
    for piece in blocks:
        kept = without_billing_line(piece) if isinstance(piece, str) else piece
        if kept:
            out.append(kept)


def _tool_pieces(tools: object, out: list[Piece]) -> None:
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        out.append(encoded(tools))
        return
    if any(isinstance(tool, Mapping) and "cache_control" in tool for tool in tools):
        tools = [
            {key: value for key, value in tool.items() if key != "cache_control"} if isinstance(tool, Mapping) else tool
            for tool in tools
        ]
    out.append(encoded(tools))


def head_pieces(group: str, request: Mapping[str, Any]) -> list[Piece]:
    """What stands before the first message: group, salt, template switches, tools, system or instructions."""
    out: list[Piece] = [group]
    extra = request.get("extra_body")
    places: Iterable[Mapping[str, Any]] = (request, extra) if isinstance(extra, Mapping) else (request,)
    for place in places:
        salt = place.get("cache_salt")
        if salt is not None:
            out += ["cache_salt", str(salt)]
        transfer = place.get("kv_transfer_params")
        if isinstance(transfer, Mapping):
            tags = {key: value for key, value in transfer.items() if str(key).startswith("lmcache.tag.")}
            if tags:
                out.append(encoded(tags))
        for switch in _TEMPLATE_SWITCHES:
            value = place.get(switch)
            if value is not None:
                out += [switch, value if isinstance(value, str) else encoded(value)]
    if request.get("tools"):
        out.append("tools")
        _tool_pieces(request["tools"], out)
    for key in ("system", "instructions"):
        if request.get(key):
            out.append("system")
            _system_pieces(request[key], out)
    return out
