"""Checks of launch commands outside Slurm: several nodes on localhost, contradicting counts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Kind
from ftdash.engine.check.findings import Finding, error, warning
from ftdash.engine.check.registry import check


@check
def localhost_on_several_nodes(bundle: Bundle) -> Iterator[Finding]:
    for document, shell, launch in bundle.launches():
        if shell.is_batch:
            continue
        nodes = shell.number(launch.option("--nnodes", "--num_machines")) or 1
        if nodes < 2:
            continue
        for option in ("--rdzv_endpoint", "--master_addr", "--main_process_ip"):
            value = shell.expand(launch.option(option) or "")
            if re.match(r"(localhost|127\.0\.0\.1|0\.0\.0\.0)(:|$)", value):
                first = shell.number(launch.option("--node_rank", "--machine_rank")) == 0
                yield (warning if first else error)(
                    "rendezvous-localhost",
                    document.at(launch.line),
                    f"{option} {value} on {nodes} nodes: "
                    + ("good for this first node alone" if first else "each waits for itself"),
                    "name the first node as the others reach it",
                )
        if launch.launcher == "torchrun" and launch.has("--standalone"):
            yield error(
                "nnodes-standalone",
                document.at(launch.line),
                f"--standalone with --nnodes {nodes}: each node trains its own model",
                "--rdzv_backend c10d --rdzv_endpoint HOST:PORT",
            )


@check
def counts_on_command_and_file(bundle: Bundle) -> Iterator[Finding]:
    """A flag of accelerate launch wins over its config file."""
    for document, shell, launch in bundle.launches():
        if launch.launcher != "accelerate" or not launch.option("--config_file"):
            continue
        for config in bundle.of(Kind.ACCELERATE):
            if config.path.name != str(launch.option("--config_file")).rsplit("/", 1)[-1]:
                continue
            for key in ("num_processes", "num_machines"):
                said, written = shell.number(launch.option(f"--{key}")), config.get(key)
                sizes = config.section("parallelism_config")
                if said and written and isinstance(written.value, int) and said != written.value and sizes:
                    yield warning(
                        "count-overridden",
                        document.at(launch.line),
                        f"--{key} {said} wins over {written.value} in {written.where}, which the mesh there "
                        "was made for",
                        "say it in one place",
                    )
