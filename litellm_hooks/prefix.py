"""A request's prefix as a chain of keys, and the memory that lets a session's next turn hash only what is new."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from litellm_hooks.canonical import (
    MEDIA_CHARS,
    Media,
    Piece,
    encoded,
    first_user,
    head_pieces,
    message_pieces,
    size_of,
    without_billing_line,
)

BIG_PIECE = 8192
BIG_WIDE_PIECE = 1024
"""Characters from which a piece is worth recognising by samples instead of hashing it again. Hashing 8 KiB of ASCII
takes about as long as drawing the samples; other text has to be encoded first and takes ten times as long."""

HUGE_PIECE = 1 << 20
"""Characters from which a piece is hashed by its ends and evenly spread samples only: 10 MB of text must stay cheap."""

CHUNK = 2048
"""Characters a raw prompt of /v1/completions is cut into: it has no messages that would mark where turns end."""

MAX_CHUNKS = 512


UNSETTLED = 4
"""Messages at the end of a request that the next one may have in another form."""

SETTLED_MEAN = 2000
"""Characters a message up to which many are recognised as one piece; longer ones are, each by its samples, sooner."""

_settled_encoder = msgspec.json.Encoder()
_NOT_PLAIN = (TypeError, ValueError, RecursionError, OverflowError)


class Prefix(msgspec.Struct, frozen=True):
    """The chain of one request.

    `keys[i]` identifies everything up to and including message `i` (64 bits), `ends[i]` is the size in characters up
    to there, `root` the index of the first user message: matches before it count for nothing, because a system prompt
    that everybody shares must not pull everybody to one replica. `anchor` is the key that workers without shared
    state agree on. `keys` is empty where there is nothing to go by.
    """

    keys: list[int]
    ends: list[int]
    root: int
    anchor: int

    @property
    def size(self) -> int:
        """Characters of the whole prompt."""
        return self.ends[-1] if self.ends else 0


NO_PREFIX = Prefix([], [], 0, 0)


def _bytes_of(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return text.encode("utf-8", "surrogatepass")


def _digest(piece: Piece) -> bytes:
    """Eight bytes that stand for a big piece; a huge one by its ends, its length and 64 samples."""
    size = len(piece)
    if size <= HUGE_PIECE:
        return xxhash.xxh3_64_digest(_bytes_of(piece))
    step = size // 64
    spans = [piece[: 1 << 17], piece[-(1 << 17) :], *(piece[at : at + 1024] for at in range(0, size, step))]
    return xxhash.xxh3_64_digest(b"".join(_bytes_of(span) for span in spans) + size.to_bytes(8, "little"))


def _samples(piece: Piece) -> bytes:
    middle = len(piece) // 2
    drawn = "".join((piece[:128], piece[middle : middle + 128], piece[-128:]))
    return _bytes_of(drawn) + len(piece).to_bytes(8, "little")


def _is_big(text: str) -> bool:
    return len(text) > (BIG_PIECE if text.isascii() else BIG_WIDE_PIECE)


def _joined(pieces: Sequence[Piece], exact: bool) -> bytes:
    """The bytes of a message; a big piece is replaced by its digest where `exact`, by its samples elsewhere."""
    return b"\x1f".join(
        [(_digest(piece) if exact else _samples(piece)) if _is_big(piece) else _bytes_of(piece) for piece in pieces]
    )


def _flat(message: object) -> str | None:
    """A message of one of the three usual forms (a text, a tool's result, tool calls) as its pieces joined, where none
    of them is big; None for any other, which `_read` takes apart."""
    if type(message) is not dict:
        return None
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or role == "system":
        return None
    if type(content) is str and content:
        if _is_big(content):
            return None
        text = f"{role}\x1f{content}"
    elif "content" in message and (content is None or content == ""):
        text = role
    else:
        return None
    if len(message) == 2:
        return text
    if len(message) != 3:
        return None
    other = message.get("tool_call_id")
    if type(other) is str:
        return None if _is_big(other) else f"{text}\x1ftool_call_id\x1f{other}"
    calls = message.get("tool_calls")
    if type(calls) is list:
        other = encoded(calls)
        return None if _is_big(other) else f"{text}\x1ftool_calls\x1f{other}"
    return None


def _read(message: object) -> tuple[list[Piece], int, bytes | None]:
    """The message's pieces, the characters it counts as, and its bytes where so few can hold no big piece."""
    pieces = _pieces_of(message)
    chars = len(pieces) - 1
    other = 0
    for piece in pieces:
        chars += len(piece)
        if type(piece) is Media:
            other += MEDIA_CHARS - len(piece)
    if chars > BIG_PIECE:
        return pieces, chars + other, None
    text = "\x1f".join(pieces)
    return pieces, chars + other, _bytes_of(text) if chars <= BIG_WIDE_PIECE or text.isascii() else None


def _recognition(message: object) -> int:
    """A print by which a message is known again; the digest of all its bytes where no piece of it is big."""
    text = _flat(message)
    if text is not None:
        return xxhash.xxh3_64_intdigest(_bytes_of(text))
    pieces, _, whole = _read(message)
    return xxhash.xxh3_64_intdigest(_joined(pieces, exact=False) if whole is None else whole)


class _Trail(msgspec.Struct):
    """What one session's last request looked like: recognition prints, chain keys and ends, message by message; and
    a running hash of the first `settled` messages as JSON."""

    prints: array[int]
    keys: array[int]
    ends: array[int]
    settled: int
    settled_hash: xxhash.xxh3_64

    @classmethod
    def up_to(cls, count: int, old: _Trail | None) -> _Trail:
        """A trail of the first `count` messages of `old`, nothing of it settled yet."""
        if old is None:
            return cls(array("Q"), array("Q"), array("Q"), 0, xxhash.xxh3_64())
        return cls(old.prints[:count], old.keys[:count], old.ends[:count], 0, xxhash.xxh3_64())

    def extend(self, messages: Sequence[object], seed: int, head: int) -> None:
        """Goes on with `messages`, each hashed whole. A first turn may bring thousands of them, and the proxy's loop
        stands still meanwhile: two hashes a message, and as few steps in Python as will do."""
        digest = xxhash.xxh3_64_intdigest
        key, end = (self.keys[-1], self.ends[-1]) if self.keys else (seed, head)
        prints: list[int] = []
        keys: list[int] = []
        ends: list[int] = []
        for message in messages:
            text = _flat(message)
            if text is not None:
                end += len(text)
                known_by = exact = _bytes_of(text)
            else:
                pieces, size, whole = _read(message)
                end += size
                known_by = whole or _joined(pieces, exact=False)
                exact = whole or _joined(pieces, exact=True)
            prints.append(digest(known_by))
            key = digest(exact, key)
            keys.append(key)
            ends.append(end)
        self.prints.extend(prints)
        self.keys.extend(keys)
        self.ends.extend(ends)


class SessionMemory:
    """The chains of recent sessions, bounded by messages in total.

    A message is recognised by its exact bytes where it is small and by samples and length where it is big; a message
    recognised wrongly (equal length, equal samples, other content) costs a wrong guess about a cache, nothing else.
    Not safe for several threads at once: the hook calls it under its lock.
    """

    def __init__(self, max_messages: int = 400_000) -> None:
        self.max_messages = max_messages
        self.messages = 0
        self.reused = 0
        self.hashed = 0
        self._trails: OrderedDict[tuple[int, ...], _Trail] = OrderedDict()

    def __len__(self) -> int:
        return len(self._trails)

    def chain(self, seed: int, head: int, messages: Sequence[object], root: int) -> tuple[list[int], list[int]]:
        """Keys and ends of `messages` after a head of `head` characters that hashed to `seed`."""
        # Sessions that begin with the same question differ in its answer.
        name = (seed, *map(_recognition, messages[root : root + 2]))
        old = self._trails.get(name)
        running = _still_settled(messages, old) if old is not None else None
        sure = known = old.settled if old is not None and running is not None else 0
        if old is not None:
            limit = min(len(messages), len(old.prints))
            while known < limit and old.prints[known] == _recognition(messages[known]):
                known += 1
        trail = _Trail.up_to(known, old)
        trail.extend(messages[known:] if known else messages, seed, head)
        self.reused += known
        self.hashed += len(messages) - known
        # The first turn of a session is seen once, and nothing of it is known: what costs it time must wait.
        if old is not None:
            trail.settled, trail.settled_hash = _settle(messages, trail.ends[-1] - head, sure, running)
        self._remember(name, trail)
        return trail.keys.tolist(), trail.ends.tolist()

    def _remember(self, name: tuple[int, ...], trail: _Trail) -> None:
        old = self._trails.pop(name, None)
        self.messages += len(trail.keys) - (len(old.keys) if old is not None else 0)
        self._trails[name] = trail
        while self.messages > self.max_messages and len(self._trails) > 1:
            _, gone = self._trails.popitem(last=False)
            self.messages -= len(gone.keys)


def _still_settled(messages: Sequence[object], trail: _Trail) -> xxhash.xxh3_64 | None:
    """The hash of the trail's settled messages where the leading ones are those, else None.

    One call of the JSON encoder for many small messages costs a tenth of looking at each.
    """
    if not 0 < trail.settled <= len(messages):
        return None
    try:
        running = xxhash.xxh3_64(_settled_encoder.encode_lines(messages[: trail.settled]))
    except _NOT_PLAIN:
        return None
    return running if running.intdigest() == trail.settled_hash.intdigest() else None


def _settle(
    messages: Sequence[object], size: int, sure: int, running: xxhash.xxh3_64 | None
) -> tuple[int, xxhash.xxh3_64]:
    """How many leading messages the next turn may recognise as one piece, and their hash; `running` is that of the
    first `sure`. The last few are left out: clients mark them, for one turn only (`cache_control`)."""
    count = len(messages) - UNSETTLED
    if count < sure or size > SETTLED_MEAN * len(messages):
        return 0, xxhash.xxh3_64()
    running = running or xxhash.xxh3_64()
    try:
        running.update(_settled_encoder.encode_lines(messages[sure:count]))
    except _NOT_PLAIN:
        return 0, xxhash.xxh3_64()
    return count, running


def _pieces_of(message: object) -> list[Piece]:
    pieces = message_pieces(message)
    if pieces[0] == "system" and len(pieces) > 1:
        pieces[1] = without_billing_line(pieces[1])
    return pieces


def _head(group: str, request: Mapping[str, Any], earlier: int) -> tuple[int, int]:
    pieces = head_pieces(group, request)
    return xxhash.xxh3_64_intdigest(_joined(pieces, exact=True), seed=earlier), sum(size_of(piece) for piece in pieces)


def chat_prefix(
    group: str, messages: Sequence[object], request: Mapping[str, Any], memory: SessionMemory, earlier: int = 0
) -> Prefix:
    """The prefix of a chat, /v1/messages or /v1/responses request.

    `earlier` is the last key of the response that `previous_response_id` names, 0 for none. The answer has no keys
    where there are no messages at all.
    """
    if not messages:
        return NO_PREFIX
    seed, head = _head(group, request, earlier)
    root = max(0, first_user(messages))
    keys, ends = memory.chain(seed, head, messages, root)
    return Prefix(keys, ends, root, keys[root])


def text_prefix(group: str, prompt: str, request: Mapping[str, Any]) -> Prefix:
    """The prefix of a raw prompt: a key every 2,048 characters, the last one for the whole."""
    seed, head = _head(group, request, 0)
    keys: list[int] = []
    ends: list[int] = []
    key = seed
    for start in range(0, min(len(prompt), CHUNK * MAX_CHUNKS), CHUNK):
        span = prompt[start : start + CHUNK]
        key = xxhash.xxh3_64_intdigest(_bytes_of(span), seed=key)
        keys.append(key)
        ends.append(head + start + len(span))
    if len(prompt) > CHUNK * MAX_CHUNKS:
        keys.append(xxhash.xxh3_64_intdigest(_digest(prompt), seed=key))
        ends.append(head + len(prompt))
    if not keys:
        return NO_PREFIX
    return Prefix(keys, ends, 0, keys[0])
