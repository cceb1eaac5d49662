"""`python -m tests.soak --minutes 10 [--json FILE]`"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtier.model import find_model
from tests.soak.run import Report, as_json, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-", dir=given.folder) as folder:
        report = soak(Path(folder), find_model("random", print), given.minutes * 60, given.seed)
    show(report)
    if given.json:
        given.json.write_text(as_json(report) + "\n")
    return int(bool(report.failures or report.answers.wrong or report.chunks.wrong or report.leaks()))


def show(report: Report) -> None:
    table = Table("", "", title=f"soak of {report.seconds:.0f} s")
    answers, chunks = report.answers, report.chunks
    faults = ", ".join(f"{count} {name}" for name, count in sorted(report.faults.items()))
    for name, value in [
        ("faults", faults),
        ("requests", f"{report.requests}, failed {len(report.failures)}"),
        ("prompt tokens from the tier", f"{report.tokens_from_tier:,}"),
        ("chunks found corrupt, loads failed", f"{report.chunks_corrupt}, {report.chunks_load_failed}"),
        (
            "answers compared",
            f"{answers.compared}, wrong {len(answers.wrong)}, too close to tell {answers.undecided}",
        ),
        (
            "chunks compared by value",
            f"{chunks.compared}, wrong {chunks.wrong}, largest difference {chunks.largest_difference:.1e}",
        ),
        ("read and written by the tier", f"{report.moved_mib:,.0f} MiB"),
        (
            "growth after the warm-up",
            f"resident memory {' + '.join(f'{grown:.0f}' for grown in report.memory_growth_mib)} MiB (each third), "
            f"descriptors {report.descriptors_growth:.0f}, threads {report.threads_growth:.0f}, "
            f"staging slots missing {report.slots_missing}",
        ),
    ]:
        table.add_row(name, value)
    Console().print(table)
    if not report.mounted:
        print("The disk was not filled nor made read-only: this machine does not let a test mount one.")
    for line in [*report.failures[:5], *report.answers.wrong[:5], *report.leaks()]:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
