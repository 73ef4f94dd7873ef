"""The `ftdash` command: finds the subcommand and loads only what it needs.

Without arguments the app opens; a plain first frame is written before Textual is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence

COMMANDS = {
    "plan": "what a run would cost: memory, traffic, time",
    "fit": "rank the strategies that fit, best first",
    "simulate": "the real model class under fake tensors, no GPU",
    "configs": "write the configs and commands of a plan",
    "check": "find traps in configs and scripts before they cost days",
    "launch": "start a run, or run your own command under the agent",
    "demo": "train a tiny MoE on two CPU ranks and watch it",
    "runs": "list runs",
    "status": "one run, its ranks and alerts, now",
    "watch": "follow a run as lines",
    "stop": "stop a run and every process of it",
    "diagnose": "name the rank that hangs the job",
    "attach": "watch a job that somebody else started",
    "compare": "two runs side by side",
    "calibrate": "learn constants from finished runs",
    "checkpoint": "list, convert and verify checkpoints",
    "doctor": "what this machine offers, and what is wrong with it",
    "export": "a run as CSV or OpenMetrics text",
    "agent": "run a launcher under the node agent (used by launch)",
}


# What people type first, at the end of a command's help.
EXAMPLES = {
    "plan": (
        "plan --model qwen3-8b --gpus 8 --gpu h100-sxm-80g --method lora --seq-len 8192",
        "plan --from accelerate.yaml --model llama-3.1-8b --json",
    ),
    "fit": ("fit --model qwen3-32b --gpus 16 --gpu a100-80g",),
    "configs": ("configs --model qwen3-8b --gpus 8 --strategy zero3 --out configs",),
    "check": ("check accelerate.yaml ds.json train.py job.sbatch",),
    "launch": (
        "launch --model tiny-moe --device cpu --gpus 2 --steps 50",
        "launch --backend slurm --model qwen3-8b --gpus 16 --nodes 2 --partition gpu",
        "launch -- torchrun --nproc-per-node 8 mine.py",
    ),
    "diagnose": ("diagnose last", "diagnose --pid 4711", "diagnose --flight dumps --logs logs"),
    "attach": ("attach --slurm 4711", "attach --pid 4711"),
    "checkpoint": ("checkpoint ls runs", "checkpoint verify runs/checkpoint-100"),
    "compare": ("compare first second",),
}


class UserError(Exception):
    """Bad input: the text is one clear line naming the flag or file; exit status 2."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        # the library's own takes -7e9 and -inf for flags, and then says that a value is missing
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf$|nan$)")

    def parse_args(self, args=None, namespace=None):
        """As the library does, but a flag that is not known is told with those that are near to it."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            import difflib

            flag = rest[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            begins = [name for name in known if flag.startswith("--") and name.startswith(flag)]
            near = begins or difflib.get_close_matches(flag, known, cutoff=0.7)
            words = f"near: {', '.join(near)}" if near else f"{self.prog} --help lists what there is"
            self.error(
                f"unknown flag {flag}; {words}" if flag.startswith("-") else f"unexpected {flag}; {words}"
            )
        return found

    def parse_known_args(self, args=None, namespace=None):
        """As the library does, but `--flag=--` is a missing value: argparse turns it into a list."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            missing = value == [] and value is not action.default
            if missing and action.nargs is None and action.option_strings:
                self.error(f"{action.option_strings[0]}: expected one value")
        return found, rest

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(message)


def _examples(lines: Sequence[str]) -> str:
    return "\n".join(["for example:", *(f"  ftdash {line}" for line in lines)]) if lines else ""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items() if name != "agent"]
    return "\n".join(
        ["usage: ftdash [COMMAND] [--help]", "", "Without a command the app opens.", "", *lines, ""]
    )


def run(argv: Sequence[str]) -> int:
    """Run one command line. Raises UserError for bad input."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version")):
        from ftdash.tui.app import open_app

        return open_app(list(argv))
    if argv[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    if argv[0] == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"ftdash {version('ftdash')}\n")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}: one of {', '.join(c for c in COMMANDS if c != 'agent')}")
    module = importlib.import_module(f"ftdash.tui.commands.{name}")
    parser = _Parser(
        prog=f"ftdash {name}",
        description=COMMANDS[name],
        epilog=_examples(EXAMPLES.get(name, ())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    module.add_arguments(parser)
    args = parser.parse_args(list(argv[1:]))
    code = int(module.run(args) or 0)
    for note in getattr(args, "notes", ()):  # only beside a result: an error stays one line
        _complain(note, code)
    return code


def main() -> None:
    """Entry point of the console script: one line for bad input, a traceback only with --debug."""
    from ftdash.tui.output import standard_output

    with standard_output():
        sys.exit(guarded(sys.argv[1:]))


def guarded(argv: Sequence[str]) -> int:
    """Run one command line and turn every failure into one line on stderr and an exit status."""
    try:
        return run(argv)
    except UserError as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if "--debug" in argv or os.environ.get("FTDASH_DEBUG"):
            raise
        from ftdash.monitor.rundir import RunError

        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            return _complain(f"{os.fsdecode(error.filename)}: {error.strerror}", 2)
        if isinstance(error, RunError | OSError):
            return _complain(str(error), 2)
        return _complain(f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1)


def _complain(text: str, code: int) -> int:
    """One line, whatever was typed or stood in a file: no control characters, no endless words."""
    words = (word if len(word) <= 300 else f"{word[:60]}…" for word in text.split())
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(words))
    sys.stderr.write(f"ftdash: {line}\n")
    return code


if __name__ == "__main__":
    # as `python -m` this file is a second module, whose UserError is not the one that commands raise
    from ftdash.tui import cli

    cli.main()
