"""`--smoke` proves its identities with real processes, and fails when one does not hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ftdash.engine.train import smoke


def test_two_gloo_ranks_prove_all_identities():
    done = subprocess.run(
        [sys.executable, "-m", "ftdash.engine.train", "--smoke"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["proved"] * len(smoke.PROOFS) + ["smoke"]
    assert "with 22 and 7 loss tokens" in done.stdout


@pytest.mark.slow
def test_an_identity_that_does_not_hold_ends_it_with_an_error(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "from ftdash.engine.train import smoke\n"
        "def wrong(rank, world):\n"
        "    smoke._hold(0.25 if rank else 0.0, 'averaged gradients')\n"
        "smoke.PROOFS = (wrong,)\n"
        "if __name__ == '__main__':\n"
        "    raise SystemExit(smoke.run())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "smoke failed: AssertionError: averaged gradients: gradients differ by 0.25" in done.stderr
