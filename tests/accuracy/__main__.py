"""`python -m tests.accuracy`: plans every published run and prints how far off the plans are."""

from __future__ import annotations

import argparse
import sys

from ftdash.tui.output import standard_output
from tests.accuracy.misses import FIRST_SIGHT_OF_THIRD, WHY_AFTERWARDS, WHY_THIRD
from tests.accuracy.report import compare, render, render_apart
from tests.accuracy.rows import AFTERWARDS, THIRD, read


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy", description=__doc__)
    parser.add_argument("--rows", action="store_true", help="one line per row as well")
    args = parser.parse_args()
    rows = read()
    sys.stdout.write(render(rows, compare(rows), each_row=args.rows))
    sys.stdout.write(render_apart("looked up afterwards", compare(read(AFTERWARDS)), WHY_AFTERWARDS))
    third = compare(read(THIRD))
    sys.stdout.write(render_apart("a third look-up", third, WHY_THIRD, FIRST_SIGHT_OF_THIRD))
    return 0


if __name__ == "__main__":
    with standard_output():
        sys.exit(main())
