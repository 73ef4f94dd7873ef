"""`python -m ftdash.engine.simulate.worker`: one request on stdin, one answer a line on stdout."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import msgspec

from ftdash.engine.simulate.request import Answer, Request


def main() -> int:
    """Run every depth of the request. Whatever the libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: Answer) -> None:
        answers.write(msgspec.json.encode(message).decode() + "\n")
        answers.flush()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
        answer(Answer(progress="loading torch and transformers"))
        from ftdash.engine.simulate import step

        step.prepare_processes(request.world)
        mesh = step.make_mesh(request) if request.shards else None
        for layers in request.layer_counts:
            run = step.run_step(request, layers, mesh, lambda text: answer(Answer(progress=text)))
            answer(Answer(run=run))
    except Exception as error:
        answer(Answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    # Fake process groups and fake tensors have nothing to tear down; interpreter exit takes seconds.
    sys.stderr.flush()
    os._exit(code)
