"""Which replica is believed to hold which prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from litellm_hooks.prefix import Prefix

HOLDERS_A_PREFIX = 6
"""Replicas remembered for one prefix: where it is now, and where it was before it moved."""

STRIKES = 2
"""Predicted hits in a row that were measured as none before a replica's claim on a session is forgotten."""


class _Holder:
    """One life of one replica. Forgetting a replica marks its holder, which every entry shares."""

    __slots__ = ("alive", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True


class PrefixTable:
    """Prefix keys to the replicas that hold them, least recently used out first.

    Within one request the deepest key is the first to go. Not safe for several threads at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[int, tuple[_Holder, ...]] = OrderedDict()
        self._holders: dict[str, _Holder] = {}
        self._strikes: OrderedDict[tuple[int, str], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, prefix: Prefix, names: Sequence[str]) -> dict[str, int]:
        """For each of `names` that holds any of the prefix from the root on: the index of the deepest key it holds.

        The deepest comes first; of equals, the one that was given the prefix last.
        """
        found: dict[str, int] = {}
        entries = self._entries
        # Who holds a deep key was given the root too, and the root is the last key of a prompt to be forgotten: who is
        # not there is nowhere, unless the root has more holders than an entry remembers.
        at_root = entries.get(prefix.keys[prefix.root])
        if at_root is None:
            return found
        wanted = set(names)
        if len(at_root) < HOLDERS_A_PREFIX:
            wanted &= {holder.name for holder in at_root if holder.alive}
        if not wanted:
            return found
        for index in range(len(prefix.keys) - 1, prefix.root - 1, -1):
            holders = entries.get(prefix.keys[index])
            if holders is None:
                continue
            for holder in holders:
                if holder.alive and holder.name in wanted:
                    found[holder.name] = index
                    wanted.discard(holder.name)
            if not wanted:
                break
        return found

    def record(self, prefix: Prefix, name: str) -> None:
        """`name` has just been given this prompt: it holds every prefix of it from the root on."""
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = _Holder(name)
        entries = self._entries
        alone: tuple[_Holder, ...] = (holder,)
        seen: tuple[_Holder, ...] = ()
        moved = alone
        for index in range(len(prefix.keys) - 1, prefix.root - 1, -1):
            key = prefix.keys[index]
            holders = entries.get(key)
            if holders is None:
                entries[key] = alone
                continue
            if holders[0] is not holder:
                if holders is not seen:  # thousands of keys of a session have one tuple
                    seen = holders
                    others = [other for other in holders if other is not holder and other.alive]
                    moved = (holder, *others[: HOLDERS_A_PREFIX - 1])
                entries[key] = moved
            entries.move_to_end(key)
        while len(entries) > self.limit:
            entries.popitem(last=False)

    def forget(self, prefix: Prefix, name: str, after: int = -1) -> None:
        """`name` holds nothing of this prefix from the root on, or nothing beyond index `after`."""
        for key in prefix.keys[max(prefix.root, after + 1) :]:
            holders = self._entries.get(key)
            if holders is None:
                continue
            kept = tuple(holder for holder in holders if holder.name != name)
            if kept:
                self._entries[key] = kept
            else:
                del self._entries[key]

    def forget_replica(self, name: str) -> None:
        """`name` came back empty: every claim of it ends at once, in constant time."""
        holder = self._holders.pop(name, None)
        if holder is not None:
            holder.alive = False

    def measured(self, prefix: Prefix, name: str, hit: bool) -> bool:
        """A predicted hit of `name` was measured; the second miss in a row forgets it. True where it was forgotten."""
        mark = (prefix.anchor, name)
        if hit:
            self._strikes.pop(mark, None)
            return False
        count = self._strikes.pop(mark, 0) + 1
        if count >= STRIKES:
            self.forget(prefix, name)
            return True
        self._strikes[mark] = count
        while len(self._strikes) > 10_000:
            self._strikes.popitem(last=False)
        return False
