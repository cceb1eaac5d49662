"""A store's directory seen from outside, while engines may have it open: its namespaces and its account."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from lmcache_nvme_backend.store import account, osio, recovery, session
from lmcache_nvme_backend.store.format import BLOCK, parse_names
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import DESCRIPTION, Description, is_namespace_dir, read_description
from lmcache_nvme_backend.store.staleness import mark_stale
from lmcache_nvme_backend.store.survey import Ledgers, Part, Seen, Survey, now_ns

_HUB = "hub:"


class StoreTree:
    """The directory of a `ChunkStore`. Methods raise `OSError` where something cannot be listed."""

    kind = "nvme"

    def __init__(self, root: str) -> None:
        """`root` is absolute and resolved."""
        self.root = root
        self.layout = Layout(root)

    @classmethod
    def is_at(cls, root: str) -> bool:
        """Whether a store has been opened under this root."""
        layout = Layout(root)
        names = recovery.list_dir_or_raise(layout.base)
        return any(f"{layout.base}/{name}" in (layout.account, layout.sessions) for name in names) or any(
            is_namespace_dir(name) for name in names
        )

    def names(self) -> list[str]:
        """The digests of all namespaces."""
        found = sorted(name for name in recovery.list_dir_or_raise(self.layout.base) if is_namespace_dir(name))
        return [name for name in found if _is_dir(self.layout.namespace(name))]

    def directory(self, name: str) -> str:
        return self.layout.namespace(name)

    def peers(self) -> list[session.Peer]:
        """The stores that are open now."""
        try:
            return session.live_peers(self.layout)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def chunks(self, name: str) -> Iterator[Seen]:
        """Every chunk of a namespace with its time; what goes meanwhile is left out."""
        directory = self.layout.namespace(name)
        for shard in recovery.list_dir_or_raise(directory):
            if shard not in recovery.SHARDS:
                continue
            for file in recovery.list_dir_or_raise(f"{directory}/{shard}"):
                parsed, _ = parse_names([file], shard)
                for _, depth, blocks in parsed:
                    used_ns = recovery.file_time(f"{directory}/{shard}/{file}")
                    if used_ns is not None:
                        yield Seen(f"{shard}/{file}", blocks * BLOCK, depth, used_ns)

    def part(self, name: str, at_ns: int) -> Part:
        """One namespace, without what only a look at all of them tells."""
        directory = self.layout.namespace(name)
        description = read_description(directory)
        part = Part(name)
        if description is not None:
            part.facts, part.model_name = description.facts, _model_name(description)
        part.count(self.chunks(name), at_ns)
        scan = recovery.NamespaceScan(directory)
        for _ in scan:
            pass
        part.other_bytes = scan.other_bytes
        opened_ns = recovery.file_time(f"{directory}/{DESCRIPTION}")
        if opened_ns is not None and part.chunks:
            part.used_ns = max(part.used_ns or 0, opened_ns)
        return part

    def survey(self, unused_s: float) -> Survey:
        """Everything; a namespace that nobody has used for `unused_s` seconds is stale."""
        at_ns = now_ns()
        before = account.look(self.layout.account)
        parts = [self.part(name, at_ns) for name in self.names()]
        found = recovery.count_store(self.layout)
        foreign = recovery.count_foreign(self.layout)
        after = account.look(self.layout.account)
        peers = self.peers()
        for part in parts:
            part.open_by = sorted({peer.pid for peer in peers if peer.namespace == part.name})
        mark_stale(parts, unused_s, at_ns)
        temporaries = recovery.list_dir(self.layout.temp)
        strays = found - sum(part.nbytes + part.other_bytes for part in parts)
        return Survey(
            layout="nvme",
            root=self.root,
            parts=parts,
            nbytes=sum(part.nbytes for part in parts),
            temporaries=len(temporaries),
            temporary_bytes=recovery.count_tree(self.layout.temp),
            foreign_bytes=foreign + max(0, strays),
            ledgers=Ledgers(
                account_used=before[0].used if before else None,
                account_used_after=after[0].used if after else None,
                account_reserved=after[0].reserved if after else None,
                unfinished=bool(before and after and before[1] and after[1]),
                found=found + foreign,
                quotas=sorted({peer.quota_bytes for peer in peers if peer.quota_bytes}),
            ),
            reads_count_as_use=True,
            taken_ns=at_ns,
        )


def _is_dir(path: str) -> bool:
    try:
        return stat.S_ISDIR(osio.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _model_name(description: Description) -> str | None:
    """Where the model was read from; a hub model's name is part of its identity, too."""
    noted = description.notes.get("model_name")
    model = description.facts.get("model")
    if noted is None and isinstance(model, str) and model.startswith(_HUB):
        return model.removeprefix(_HUB).rpartition("@")[0] or None
    return noted
