"""`python -m pytest_sglmem`: read what a run left behind, on any machine, torch or not.

    judge trace.json                 the verdict on a saved trace; status 1 for a leak
    show report.json [--html PAGE]   the summary of a report, in full; or its page
    compare new.json baseline.json   what grew; status 1 where something did, or where no test could be compared

A wrong file or argument is one line on standard error and status 2. It runs no test.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

from . import report
from .judge import judge
from .records import Trace
from .words import verdict_message


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` without the program's name (None: the process's own). Returns the exit status."""
    asked = _parser().parse_args(argv)
    try:
        return asked.command(asked)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_sglmem", description="Read what pytest-sglmem left behind.")
    commands = parser.add_subparsers(required=True, metavar="judge|show|compare")

    judged = commands.add_parser("judge", help="the verdict on a trace that was saved")
    judged.add_argument("trace", help="a trace.json, of an artifacts directory or Trace.save")
    judged.add_argument("--tolerance", type=int, default=0, metavar="BYTES", help="growth a cycle that passes (0)")
    judged.add_argument(
        "--ignore-site", action="append", default=[], metavar="PATTERN", help="as ini sglmem_ignore_sites"
    )
    judged.set_defaults(command=_judge)

    show = commands.add_parser("show", help="a report's summary, in full")
    show.add_argument("report", help="a report.json")
    show.add_argument("--brief", action="store_true", help="as the end of a session prints it")
    show.add_argument("--html", metavar="PAGE", help="write the report as a page instead")
    show.set_defaults(command=_show)

    compare = commands.add_parser("compare", help="what grew between two reports")
    compare.add_argument("new", help="the later report.json")
    compare.add_argument("baseline", help="the earlier one")
    compare.add_argument("--tolerance", type=float, default=0, metavar="PERCENT", help="growth that passes (0)")
    compare.set_defaults(command=_compare)
    return parser


def _judge(asked: argparse.Namespace) -> int:
    trace = Trace.load(asked.trace)
    verdict = judge(trace, tolerance=asked.tolerance, ignore_sites=tuple(asked.ignore_site))
    print(verdict_message(verdict))
    return int(verdict.verdict == "leak")


def _show(asked: argparse.Namespace) -> int:
    document = report.load(asked.report)
    if asked.html is not None:
        if not asked.html.endswith(".html"):
            raise ValueError(f"--html names a page, something.html (got {asked.html!r})")
        report.write(document, asked.html)
        return 0
    width = shutil.get_terminal_size().columns
    for line in report.terminal_lines(document, width, 0 if asked.brief else 1):
        print(line)
    return 0


def _compare(asked: argparse.Namespace) -> int:
    new, baseline = report.load(asked.new), report.load(asked.baseline)
    grown = report.compare(new, baseline, asked.tolerance)
    compared = report.compared(new, baseline)
    for line in [*grown, *report.not_compared(new, baseline)]:
        print(line)
    if not compared:
        print("nothing was compared: no test that checks something is in both reports, in the same world")
    elif not grown:
        print(f"nothing grew by more than {asked.tolerance:g}%")
    return int(bool(grown) or not compared)


if __name__ == "__main__":
    sys.exit(main())
