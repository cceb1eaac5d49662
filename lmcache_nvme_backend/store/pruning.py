"""Choosing chunks that go, and removing them, also while engines run: to those they are misses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import vllm_tree
from lmcache_nvme_backend.store.guest import Guest, Removed
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.settings import UPKEEP_INTERVAL_S
from lmcache_nvme_backend.store.survey import Part, Seen, Survey
from lmcache_nvme_backend.store.trees import Tree

# Removed between two reports of progress.
_STEP = 256


class Selection(msgspec.Struct, frozen=True):
    """What should go: the chunks that every given condition names, and of them, where `keep_bytes` is given, only as
    many as have to go until so much is left under the root: see `_keep`."""

    keep_bytes: int | None = None
    older_than_s: float | None = None
    namespace: str | None = None  # the head of a part's name
    stale: bool = False
    unused_s: float = 0.0  # from when on a part is stale

    @property
    def by_use(self) -> bool:
        """Whether a chunk that is used meanwhile should stay."""
        return self.older_than_s is not None or self.stale or self.keep_bytes is not None


class Choice(msgspec.Struct):
    """What goes of one part."""

    part: Part
    files: list[Seen]
    temporaries: list[Seen] = []

    @property
    def nbytes(self) -> int:
        return sum(seen.nbytes for seen in self.files)

    @property
    def empty(self) -> bool:
        """Whether only folders are left of it, which nobody has open."""
        return self.part.stale is not None and self.part.chunks == 0


class Plan(msgspec.Struct):
    """What would go, and what stays."""

    selection: Selection
    survey: Survey
    choices: list[Choice]

    @property
    def chunks(self) -> int:
        return sum(len(choice.files) for choice in self.choices)

    @property
    def nbytes(self) -> int:
        return sum(choice.nbytes for choice in self.choices)


def plan(tree: Tree, selection: Selection) -> Plan:
    """Choose; changes nothing. Raises `ConfigError` for a namespace that is not there, `OSError` as the tree does."""
    survey = tree.survey(selection.unused_s)
    parts = [part for part in survey.parts if _is_meant(part, selection)]
    oldest_ns = survey.taken_ns - int((selection.older_than_s or 0) * 1e9)
    choices = []
    for part in parts:
        files = [seen for seen in tree.chunks(part.name) if selection.older_than_s is None or seen.used_ns < oldest_ns]
        choices.append(Choice(part, files))
    if selection.keep_bytes is not None:
        _keep(choices, survey.nbytes - selection.keep_bytes)
    elif isinstance(tree, vllm_tree.VllmTree):
        young_ns = survey.taken_ns - int(vllm_tree.YOUNG_TEMPORARY_S * 1e9)
        for choice in choices:
            choice.temporaries = [seen for seen in tree.temporaries(choice.part.name) if seen.used_ns < young_ns]
    return Plan(selection, survey, [choice for choice in choices if choice.files or choice.temporaries or choice.empty])


def _is_meant(part: Part, selection: Selection) -> bool:
    if selection.namespace is not None and not part.name.startswith(selection.namespace):
        return False
    return part.stale is not None or not selection.stale


def _keep(choices: list[Choice], excess: int) -> None:
    """Leave the chunks to go that free `excess` bytes: those of parts that nobody has open first, the longest unused
    part in front, each by age and then from the tails; then those of the others, by age and from the tails."""
    idle = [choice for choice in choices if not choice.part.open_by]
    idle.sort(key=lambda choice: choice.part.used_ns or 0)
    live = [choice for choice in choices if choice.part.open_by]
    takers = [[(choice, seen) for seen in choice.files] for choice in idle]
    takers.append([(choice, seen) for choice in live for seen in choice.files])
    for choice in choices:
        choice.files = []
    for taker in takers:
        for choice, seen in sorted(taker, key=lambda entry: _order(entry[1])):
            if excess <= 0:
                return
            choice.files.append(seen)
            excess -= seen.nbytes


def _order(seen: Seen) -> tuple[int, int]:
    """Within the time in which uses are written down, the tail of a prefix goes first."""
    return seen.used_ns // int(2e9 * UPKEEP_INTERVAL_S), -seen.depth


def prune(tree: Tree, plan: Plan, on_progress: Callable[[int, int], None] = lambda chunks, nbytes: None) -> Removed:
    """Do it. What has been used, or what has become open, since the plan was made stays where that was a condition.

    `on_progress` is told how many chunks and bytes have been dealt with since the last time. Raises `ConfigError` where
    the root cannot be changed; what was removed until then is accounted for.
    """
    if isinstance(tree, StoreTree):
        return _prune_store(tree, plan, on_progress)
    return _prune_vllm(tree, plan, on_progress)


def _prune_store(tree: StoreTree, plan: Plan, on_progress: Callable[[int, int], None]) -> Removed:
    done = Removed()
    with Guest(tree.layout) as guest:
        for choice in plan.choices:
            directory, name = tree.directory(choice.part.name), choice.part.name

            def is_still_meant(name: str = name) -> bool:
                return not plan.selection.stale or not guest.is_open(name)

            for files in _steps(choice.files):
                times = {f"{directory}/{seen.path}": seen.used_ns for seen in files}
                done.add(
                    guest.remove(
                        [(f"{directory}/{seen.path}", seen.nbytes) for seen in files],
                        _unused(times, lambda found: found.st_mtime_ns, plan.selection.by_use),
                        is_still_meant,
                    )
                )
                on_progress(len(files), sum(seen.nbytes for seen in files))
            guest.remove_if_empty(name)
    return done


def _prune_vllm(tree: vllm_tree.VllmTree, plan: Plan, on_progress: Callable[[int, int], None]) -> Removed:
    done = Removed()
    for choice in plan.choices:
        for files in _steps(choice.files):
            times = {f"{tree.root}/{seen.path}": seen.used_ns for seen in files}
            done.add(tree.remove(files, _unused(times, vllm_tree.used_ns, plan.selection.by_use)))
            on_progress(len(files), sum(seen.nbytes for seen in files))
        tree.remove(choice.temporaries, lambda path, found: True)
        tree.remove_if_empty(choice.part.name, plan.survey.taken_ns)
    return done


def _unused(
    times: dict[str, int], time_of: Callable[[os.stat_result], int], by_use: bool
) -> Callable[[str, os.stat_result], bool]:
    """Whether a file has not been used since it was chosen."""
    return lambda path, found: not by_use or time_of(found) <= times[path]


def _steps(files: Sequence[Seen]) -> Iterator[Sequence[Seen]]:
    for at in range(0, len(files), _STEP):
        yield files[at : at + _STEP]


def check_namespace(plans: Sequence[Plan], selection: Selection) -> None:
    """Raises `ConfigError` where the namespace that was named is in none of the trees."""
    names = [part.name for plan in plans for part in plan.survey.parts]
    wanted = selection.namespace
    if wanted is not None and not any(name.startswith(wanted) for name in names):
        raise ConfigError(
            "--namespace", repr(wanted), "the head of a namespace's name: " + (", ".join(names[:8]) or "there is none"),
            "`kvtier store inspect` lists them.",
        )  # fmt: skip


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan without its files."""
    return {
        "layout": plan.survey.layout,
        "chunks": plan.chunks,
        "bytes": plan.nbytes,
        "kept_bytes": plan.survey.nbytes - plan.nbytes,
        "parts": [
            {"name": choice.part.name, "model_name": choice.part.model_name, "chunks": len(choice.files),
             "bytes": choice.nbytes, "of_bytes": choice.part.nbytes, "stale": choice.part.stale}
            for choice in plan.choices
        ],
    }  # fmt: skip
