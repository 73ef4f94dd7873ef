"""`ftdash agent`: run a launcher under the node agent, or take over a run whose agent is gone."""

from __future__ import annotations

import argparse

from ftdash.monitor.agent import cli


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return cli.run(args)
