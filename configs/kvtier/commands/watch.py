"""``kvtier watch``: a live terminal view of running engines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer
from rich.live import Live

from kvtier.commands.common import EXIT_FAILED, JsonOption, console, errors, user_errors
from kvtier.detect import drm, nvidia
from kvtier.doctor.engine_checks import command_line
from kvtier.launch.arguments import split, transfer_config
from kvtier.observe import snapshot
from kvtier.observe.rates import change
from kvtier.observe.snapshot import Snapshot
from kvtier.plan import wishes
from kvtier.watch.view import Seen, render
from lmcache_nvme_backend.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command("watch")(watch)


@user_errors
def watch(
    url: Annotated[list[str], typer.Option(help="An engine's root; once an engine.")],
    interval: Annotated[str, typer.Option(help="Seconds between looks.")] = "2",
    looks: Annotated[str, typer.Option(help="End after so many looks; 0: until Ctrl-C.")] = "0",
    ram_gib: Annotated[str | None, typer.Option(help="Size of the RAM tier, where the engine runs elsewhere.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Pool, tokens by source, hits, tier fill, copy speed, preemptions, waiting, drafts, device memory; with what is
    bad about them. Exit code 1 where no engine answers the first look, or one of them the last."""
    pause = wishes.rate("--interval", interval, "seconds") or 0.0
    most = wishes.number_or_none("--looks", looks)
    size = wishes.size("--ram-gib", ram_gib)
    sizes = {each: (size << 30) if size else ram_tier_of(command_line(each)) for each in url}
    last: dict[str, Snapshot] = {}
    count = 0
    with (
        Live(console=console, auto_refresh=False, screen=False) if not as_json else _Quiet() as live,
        httpx.Client(trust_env=False, timeout=10.0) as client,
    ):
        while True:
            seen = [_look(each, last, sizes[each], client) for each in url]
            if as_json:
                print(msgspec.json.encode(seen).decode(), flush=True)
            else:
                live.update(render(seen), refresh=True)  # type: ignore[union-attr]
            count += 1
            lost = [each for each in seen if each.error]
            if (count == most and lost) or (count == 1 and len(lost) == len(seen)):
                for each in lost:
                    errors.print(f"{each.url}: {each.error}", style="red", markup=False, highlight=False)
                raise typer.Exit(EXIT_FAILED)
            if count == most:
                return
            time.sleep(pause)


def ram_tier_of(words: list[str] | None) -> int | None:
    """The RAM tier's bytes in an engine's command line; None where it cannot be seen or has none."""
    if not words:
        return None
    try:
        if size := dict(split(words)).get("--kv-offloading-size"):
            return int(float(size[0]) * 2**30)
        config = transfer_config(words) or {}
        return int(config["kv_connector_extra_config"]["cpu_bytes_to_use"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _look(url: str, last: dict[str, Snapshot], ram_tier_bytes: int | None, client: httpx.Client) -> Seen:
    try:
        now = snapshot.scrape(url, client)
    except ConfigError as error:
        last.pop(url, None)
        return Seen(url=url, error=error.found)
    before = last.get(url, now)
    last[url] = now
    return Seen(
        url=url,
        snapshot=now,
        change=change(before, now),
        ram_tier_bytes=ram_tier_bytes,
        device_free=_device_free(),
    )


class _Quiet:
    """In place of the live view where JSON is printed."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _device_free() -> int | None:
    """Free memory of this host's device, where a driver tells."""
    told = nvidia.free_bytes()
    return told if told is not None else drm.free_bytes(Path("/"))
