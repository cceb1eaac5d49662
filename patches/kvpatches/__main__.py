"""`python -m kvpatches`: the command line for container start, without any other dependency."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import kvpatches
from kvpatches.errors import ConfigError, Exit
from kvpatches.judge import State

_EXITS = """\
exit codes:
  0  nothing to do, or done
  1  status, apply --dry-run: a patch is needed
  2  wrong usage
  3  unknown code: nothing was changed; the message says which function and what was expected
  4  the files cannot be changed, or are not as this tool left them: nothing was changed
  5  no vLLM there
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and answer with its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except ConfigError as err:
        if args.json:
            print(json.dumps({"error": str(err), "exit": int(err.exit_code)}))
        print(f"kvpatches: {err}", file=sys.stderr)
        return err.exit_code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--site", metavar="DIR", help="directory that holds vllm/ (default: this interpreter's vLLM)")
    common.add_argument("--json", action="store_true", help="print JSON")
    parser = argparse.ArgumentParser(
        prog="python -m kvpatches",
        description="Upstream fixes for vLLM, carried until they are released.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    status = commands.add_parser("status", parents=[common], help="what is needed, applied, fixed upstream or unknown")
    status.set_defaults(run=_status)

    apply = commands.add_parser(
        "apply", parents=[common], help="make the changes that are needed (default: all patches)"
    )
    apply.add_argument("ids", nargs="*", metavar="PATCH")
    apply.add_argument("--with", dest="options", action="append", default=[], metavar="OPTION", help="see `show`")
    apply.add_argument("--dry-run", action="store_true", help="print the diff and change nothing")
    apply.set_defaults(run=_apply)

    revert = commands.add_parser("revert", parents=[common], help="take changes back (default: all)")
    revert.add_argument("ids", nargs="*", metavar="PATCH")
    revert.set_defaults(run=_revert)

    show = commands.add_parser("show", parents=[common], help="what a patch is, and what it does to the code")
    show.add_argument("id", metavar="PATCH")
    show.set_defaults(run=_show)
    return parser


def _status(args: argparse.Namespace) -> int:
    rows = kvpatches.status(args.site)
    inner = kvpatches.adaptations() if args.site is None else []
    states = {r.state for r in rows}
    if args.json:
        print(
            json.dumps({"patches": [asdict(r) for r in rows], "adaptations": [asdict(a) for a in inner]}, default=str)
        )
    else:
        where = next((f"vLLM {r.version or '(version unknown)'}: {r.file}" for r in rows if r.file), "")
        print("\n".join(filter(None, [where, *(_lines(rows, inner))])))
    if State.UNKNOWN_CODE in states | {a.state for a in inner}:
        return Exit.UNKNOWN_CODE
    if State.NOT_INSTALLED in states:
        return Exit.NOT_INSTALLED
    return Exit.NEEDED if State.NEEDED in states else Exit.OK


def _lines(rows: Sequence[kvpatches.PatchStatus], inner: Sequence[kvpatches.Adaptation]) -> list[str]:
    lines = []
    for row in rows:
        options = "".join(f"; option {name}: {state}" for name, state in row.options.items())
        lines.append(f"{row.id:<12} {row.state:<15} {row.title}")
        lines.append(f"{'':<12} {'':<15} {row.detail}{options}")
    for adaptation in inner:
        lines.append(f"{adaptation.id:<12} {adaptation.state:<15} {adaptation.title} (in the process, no file changed)")
        lines.append(f"{'':<12} {'':<15} {adaptation.detail}")
    return lines


def _apply(args: argparse.Namespace) -> int:
    if args.dry_run:
        text = kvpatches.diff(args.ids, args.site, args.options)
        print(json.dumps({"diff": text}) if args.json else text, end="\n" if args.json else "")
        return Exit.NEEDED if text else Exit.OK
    return _report(kvpatches.apply(args.ids, args.site, args.options), args, "applied")


def _revert(args: argparse.Namespace) -> int:
    return _report(kvpatches.revert(args.ids, args.site), args, "reverted")


def _report(outcomes: Sequence[kvpatches.Outcome], args: argparse.Namespace, done: str) -> int:
    if args.json:
        print(json.dumps({"files": [asdict(o) for o in outcomes]}, default=str))
    else:
        for outcome in outcomes:
            print(
                f"{outcome.file}: " + (f"{done} {', '.join(outcome.patches)}" if outcome.patches else "nothing to do")
            )
    return Exit.OK


def _show(args: argparse.Namespace) -> int:
    patch = kvpatches.get(args.id)
    if args.json:
        print(json.dumps(asdict(patch), default=str))
        return Exit.OK
    print(f"{patch.id} (revision {patch.revision}): {patch.title}\n\n{patch.fixes}\n")
    print(f"issue     {patch.issue}\npull      {patch.pull}\nfile      {patch.file}")
    print(
        f"affected  {', '.join(patch.affected)}\nfixed in  {patch.fixed}\nrequires  {', '.join(patch.requires) or '-'}"
    )
    for name, text in patch.options.items():
        print(f"\n--with {name}: {text}")
    for edit in patch.edits:
        print(f"\n{edit.name} in {edit.function}{f' (with {edit.option})' if edit.option else ''}: {edit.why}")
        for shape in edit.shapes:
            if shape.replace:
                print(f"  code of {shape.releases}:\n{_indented(shape.code)}")
                for name, code in shape.replace.items():
                    print(f"  ${name} becomes:\n{_indented(code)}")
    return Exit.OK


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.strip("\n").split("\n"))


if __name__ == "__main__":
    sys.exit(main())
