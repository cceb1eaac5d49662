"""``kvtier store``: what lies in a cache directory, whether it is good, and what can go."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvtier.commands.common import EXIT_FAILED, console, errors, user_errors
from kvtier.store import options, tables
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import pruning, verification
from lmcache_nvme_backend.store.guest import Removed
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.trees import find_trees, unreadable

app = typer.Typer(help="What lies in a cache directory, whether it is good, and what can go.", no_args_is_help=True)

Root = Annotated[
    Path, typer.Argument(help="nvme.path of an engine, or root_dir of vLLM's own fs tier.", metavar="ROOT")
]
JsonTo = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON there; - prints it instead.")]
StaleAfter = Annotated[str, typer.Option(help="What nobody has open is stale when unused for so long.")]


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="store")


@app.command()
@user_errors
def inspect(root: Root, stale_after: StaleAfter = "14d", json_to: JsonTo = None) -> None:
    """Namespaces in words, their sizes, when they were last used, who has them open, which are stale; and the account
    beside what lies on the disk. Changes nothing."""
    unused_s = options.duration("--stale-after", stale_after) or 0.0
    target = options.json_target(json_to)
    with _reading(root):
        surveys = [tree.survey(unused_s) for tree in find_trees(root)]
    _write_json(surveys, target)
    if target != "-":
        for survey in surveys:
            tables.show_survey(survey, console)


@app.command()
@user_errors
def verify(
    root: Root,
    remove_bad: Annotated[bool, typer.Option("--remove-bad", help="Remove what is bad.")] = False,
    json_to: JsonTo = None,
) -> None:
    """Read every chunk and check name, header and checksums, as a load does. Exit code 1 where something is bad, also
    if it was removed."""
    target = options.json_target(json_to)
    with _reading(root):
        tree = next((tree for tree in find_trees(root) if isinstance(tree, StoreTree)), None)
        if tree is None:
            raise ConfigError(
                "ROOT", f"{root}, of vLLM's own fs tier", "the directory of this project's store",
                "vLLM's files carry no checksum: there is nothing to hold them against.",
            )  # fmt: skip
        chunks, nbytes = verification.size(tree)
        began = time.monotonic()
        with _bar(f"{chunks:,} chunks", nbytes, bytes_moved=True) as advance:
            found = verification.verify(tree, remove_bad, advance)
    seconds = time.monotonic() - began
    _write_json({"seconds": seconds, "sound": found.sound, **msgspec.to_builtins(found)}, target)
    if target != "-":
        tables.show_verification(found, seconds, console)
    if not found.sound:
        raise typer.Exit(EXIT_FAILED)


@app.command()
@user_errors
def prune(
    root: Root,
    keep_gib: Annotated[
        str | None, typer.Option(help="Leave at most so much: the longest unused go.", metavar="GIB")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only what was last used longer ago, such as 7d.", metavar="TIME")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only the namespaces whose name begins so.", metavar="PREFIX")
    ] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Only namespaces that nobody will ask for again.")] = False,
    stale_after: StaleAfter = "14d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_to: JsonTo = None,
) -> None:
    """Remove chunks, also while engines run: to them it is a miss. Shows what would go and asks. Several conditions
    must all be met. Exit code 1 where something could not be removed."""
    selection = pruning.Selection(
        keep_bytes=options.gibibytes("--keep-gib", keep_gib),
        older_than_s=options.duration("--older-than", older_than),
        namespace=options.namespace(namespace),
        stale=stale,
        unused_s=options.duration("--stale-after", stale_after) or 0.0,
    )
    if not selection.by_use and selection.namespace is None:
        raise ConfigError(
            "kvtier store prune", "no condition", "--keep-gib, --older-than, --namespace, --stale",
            "Say what should go; --keep-gib 0 is everything.",
        )  # fmt: skip
    target = options.json_target(json_to)
    if target == "-" and not (dry_run or yes):
        raise ConfigError("--json", "'-' where prune would ask", "with --dry-run or --yes", "Add one of the two.")
    with _reading(root):
        trees = find_trees(root)
        plans = [pruning.plan(tree, selection) for tree in trees]
    pruning.check_namespace(plans, selection)
    anything = any(plan.choices for plan in plans)
    if target != "-":
        tables.show_plan(plans, console)
        if not anything:
            console.print("Nothing is to go.")
    removed: Removed | None = None
    if not dry_run and anything and (yes or _confirmed()):
        removed = Removed()
        chunks = sum(plan.chunks for plan in plans)
        with _reading(root), _bar("removed", chunks, bytes_moved=False) as advance:
            for tree, plan in zip(trees, plans):
                if plan.choices:
                    removed.add(pruning.prune(tree, plan, lambda chunks, nbytes: advance(chunks)))
        if target != "-":
            tables.show_removed(removed, console)
    _write_json({"plans": [pruning.as_json(plan) for plan in plans], "removed": removed}, target)
    if removed is not None and removed.failed:
        raise typer.Exit(EXIT_FAILED)


def _confirmed() -> bool:
    """Ask. Without an answer nothing is removed, and what would help is said."""
    try:
        answer = input("Remove them? [y/N] ")
    except EOFError:
        raise ConfigError("--yes", "neither it nor an answer", "--yes, or y on the terminal", "Add --yes.") from None
    if answer.strip().lower() in ("y", "yes"):
        return True
    console.print("Nothing was removed.")
    return False


@contextmanager
def _reading(root: Path) -> Iterator[None]:
    """What the system refuses is an error that a person can put right."""
    try:
        yield
    except OSError as error:
        raise unreadable(root, error) from None


@contextmanager
def _bar(what: str, total: int, bytes_moved: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, where that is a terminal; gives the function that moves it on."""
    if not errors.is_terminal:
        yield lambda done: None
        return
    parts = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if bytes_moved else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *parts, TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def _write_json(value: Any, target: str | None) -> None:
    if target is None:
        return
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--json", f"{target}: {error.strerror}", "a file that can be written", "Name one.") from None
