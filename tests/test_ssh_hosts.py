"""A hosts file is read strictly, and words reach the other end's shell as they are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ftdash.engine.ssh.hosts import (
    Host,
    HostsError,
    hosts_file,
    read_hosts,
    remote_command,
    store_hosts,
    stored_hosts,
)
from ftdash.monitor.rundir import Manifest, RunDir


def test_names_slots_addresses_and_comments_are_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# two nodes\nworker-1 slots=8\nme@worker-2 slots=4 address=10.0.0.2  # the old one\n\nthird\n"
    )
    assert read_hosts(file) == [
        Host("worker-1", "worker-1", 8),
        Host("me@worker-2", "10.0.0.2", 4),
        Host("third", "third", None),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no host in it"),
        ("a slots=none", "line 1: slots=none"),
        ("a\nb colour=red", "line 2: unknown setting 'colour'"),
        ("-oProxyCommand=x", "line 1"),
        ("a;b", "line 1: 'a;b' is no host name"),
        ("a\na", "line 2: a stands there twice"),
    ],
)
def test_a_bad_hosts_file_is_refused_with_its_line(text: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(HostsError, match=what):
        read_hosts(file)


def test_a_missing_hosts_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match="No such file"):
        read_hosts(tmp_path / "none")


@pytest.mark.parametrize("word", ["two words", "quo'te", '"', "$(id)", "`id`", "new\nline", "*", "a;b", ""])
def test_words_survive_the_shell_at_the_other_end(word: str) -> None:
    line = remote_command(["printf", "%s|%s", "a", word], environment={"FTDASH_X": word}, cwd="/")
    assert (
        subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == f"a|{word}"
    )


def test_the_hosts_of_a_run_are_kept_as_a_hosts_file_to_start_from_again(tmp_path: Path) -> None:
    run = RunDir.create(Manifest(run="r"), tmp_path)
    hosts = [Host("me@worker-2", "10.0.0.2", 4), Host("third", "third", None)]
    store_hosts(run, hosts)
    assert stored_hosts(run) == hosts == read_hosts(hosts_file(run))
