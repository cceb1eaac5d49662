"""What is going on, and for how long, on a terminal and in a log alike."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class Progress:
    """`say` names what starts now; the line of what was going on before is closed with the seconds it took."""

    def __init__(self, console: Console) -> None:
        self._console, self._began, self._said = console, 0.0, ""
        self._status = Status("", console=console)

    def say(self, what: str) -> None:
        """A new step begins. On a terminal a spinner turns beside it; in a log it is written at once."""
        self._close()
        self._said, self._began = what, time.monotonic()
        if self._console.is_terminal:
            self._status.update(escape(what))
            self._status.start()
        else:
            self._console.print(escape(what), highlight=False)

    def _close(self) -> None:
        if not self._said:
            return
        took = f"{time.monotonic() - self._began:.1f} s"
        if self._console.is_terminal:
            self._status.stop()
            self._console.print(f"{escape(self._said)} {took}", highlight=False)
        else:
            self._console.print(f"  {took}", highlight=False)
        self._said = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._close()
        else:
            self._status.stop()
