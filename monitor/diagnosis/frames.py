"""How to read one stack: whose code each frame is, what it waits for, in which phase, the user's own line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from ftdash.monitor.diagnosis import knowledge, origins
from ftdash.monitor.diagnosis.knowledge import Phase
from ftdash.monitor.diagnosis.model import Frame, Thread


class Origin(StrEnum):
    OWN = "own"
    LIBRARY = "library"
    STDLIB = "stdlib"
    NATIVE = "native"
    UNKNOWN = "unknown"  # no file name


class Wait(StrEnum):
    """What a thread is in, by its deepest telling frame."""

    COLLECTIVE = "collective"  # an operation of a process group, by name
    IMPLICIT = "implicit"  # a library call that waits for one (backward under DDP, FSDP's unshard)
    STORE = "store"
    RENDEZVOUS = "rendezvous"
    LOADER = "loader"
    FINALIZER = "finalizer"
    TEARDOWN = "teardown"
    WEIGHT_SYNC = "weight-sync"
    SAVE_IO = "save"
    COMPILE = "compile"
    LOCK = "lock"  # a lock file
    LIBRARY = "library"  # in a library, nothing that waits
    OWN = "own"  # in the user's own line
    NOTHING = ""


IN_COLLECTIVE = frozenset({Wait.COLLECTIVE, Wait.IMPLICIT})


_MAKING_A_GROUP = frozenset({*IN_COLLECTIVE, Wait.STORE, Wait.RENDEZVOUS})


@dataclass(frozen=True, slots=True)
class Reading:
    """One thread, read. `blocked_by` is the stdlib function that the telling frame called ("Queue.get")."""

    wait: Wait = Wait.NOTHING
    op: str = ""
    phase: Phase = Phase.UNKNOWN
    context: Phase = Phase.UNKNOWN  # the surrounding phase: eval, save, generate, …
    step: Phase = Phase.UNKNOWN  # data, forward, backward, optimizer
    telling: Frame | None = None
    own: Frame | None = None  # the user's innermost line
    callers: tuple[Frame, ...] = ()  # the user's other lines, innermost first
    blocked_by: Frame | None = None
    for_children: bool = False  # in code that talks with or waits for processes below
    thread: str = ""
    names: frozenset[str] = frozenset()  # bare names of all frames

    @property
    def in_collective(self) -> bool:
        return self.wait in IN_COLLECTIVE


_GENERATED_LINES = 2  # methods that multiprocessing's proxies and dataclasses compile from a string


@lru_cache(maxsize=65536)
def origin(frame: Frame) -> Origin:
    if origins.NATIVE_FILE.search(frame.file) or "::" in frame.name or frame.name.startswith("0x"):
        return Origin.NATIVE
    if not frame.file:
        return Origin.UNKNOWN
    if frame.file == "<string>" and frame.name != "<module>" and frame.line <= _GENERATED_LINES:
        return Origin.STDLIB
    if origins.is_stdlib(frame.file):
        return Origin.STDLIB
    if origins.is_library(frame.file):
        return Origin.LIBRARY
    return Origin.OWN


@lru_cache(maxsize=65536)
def collective_of(frame: Frame) -> str:
    """The operation a frame stands for, "" when it is none."""
    where = origin(frame)
    if where in (Origin.STDLIB, Origin.OWN):
        return ""
    name = frame.short
    communicates = not frame.file or bool(knowledge.COMM_FILE.search(frame.file))
    if name in knowledge.DISTINCT_COLLECTIVES:
        return knowledge.DISTINCT_COLLECTIVES[name]
    if communicates and name in knowledge.AMBIGUOUS_COLLECTIVES:
        return knowledge.AMBIGUOUS_COLLECTIVES[name]
    return ""


@lru_cache(maxsize=65536)
def phase_of(frame: Frame) -> Phase:
    """The phase that one frame announces; own functions are read by the words in their names."""
    name = frame.short
    for phase, pattern in knowledge.PHASE_BY_NAME.get(name, ()):
        if pattern is None or not frame.file or pattern.search(frame.file):
            return phase
    if origin(frame) is Origin.OWN:
        words = name.lower().strip("_").split("_")
        for word in words:
            found = knowledge.OWN_WORD_PHASES.get(word, Phase.UNKNOWN)
            if found and not (found is Phase.SAVE and knowledge.FIGURES.intersection(words)):
                return found
    if knowledge.COMPILE_FILE.search(frame.file) and name not in (
        "_fn",
        "inner",
        "__call__",
        "compile_wrapper",
    ):
        return Phase.COMPILE if "_inductor" in frame.file or "convert_frame" in frame.file else Phase.UNKNOWN
    return Phase.UNKNOWN


def _phases(frames: Sequence[Frame]) -> tuple[Phase, Phase]:
    """The innermost surrounding phase and the innermost phase of a step."""
    context = step = Phase.UNKNOWN
    for frame in frames:
        phase = phase_of(frame)
        if phase in knowledge.CONTEXT_PHASES:
            context = context or phase
        elif phase is not Phase.TRAIN:
            step = step or phase
        elif not step:
            step = Phase.TRAIN
    if context is Phase.INIT and step in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        # Lazy initialisation inside a step is part of the step.
        context = Phase.UNKNOWN
    return context, step


def _native_wait(frames: Sequence[Frame]) -> Wait:
    for frame in frames:
        if origin(frame) not in (Origin.NATIVE, Origin.UNKNOWN):
            break
        if knowledge.STORE_NATIVE.search(frame.name):
            return Wait.STORE
        if knowledge.COLLECTIVE_NATIVE.search(frame.name):
            return Wait.IMPLICIT
    return Wait.NOTHING


def _library_wait(frame: Frame, outer: Sequence[Frame]) -> tuple[Wait, str]:
    """What a library frame without further library frames below it means."""
    name = frame.short
    if op := collective_of(frame):
        return Wait.COLLECTIVE, op
    if name in knowledge.BACKWARD_ENGINE:
        return Wait.IMPLICIT, ""
    if name in knowledge.TEARDOWN_FUNCTIONS and name not in ("_shutdown", "_exitfunc"):
        return Wait.TEARDOWN, ""
    if name in knowledge.STORE_FUNCTIONS:
        return Wait.STORE, ""
    if name in knowledge.RENDEZVOUS_FUNCTIONS:
        return Wait.RENDEZVOUS, ""
    if name in knowledge.LOADER_FUNCTIONS and (not frame.file or knowledge.LOADER_FILE.search(frame.file)):
        return Wait.LOADER, ""
    if name in knowledge.IMPLICIT_COLLECTIVES:
        return Wait.IMPLICIT, knowledge.IMPLICIT_COLLECTIVES[name]
    if knowledge.COMM_FILE.search(frame.file) and name != "<module>":
        for caller in outer[:8]:
            if op := collective_of(caller) or knowledge.IMPLICIT_COLLECTIVES.get(caller.short, ""):
                return Wait.IMPLICIT, op
        return Wait.IMPLICIT, ""
    if knowledge.LOCK_FILE.search(frame.file):
        return Wait.LOCK, ""
    if knowledge.COMPILE_FILE.search(frame.file):
        return Wait.COMPILE, ""
    if knowledge.SAVE_FILE.search(frame.file):
        return Wait.SAVE_IO, ""
    if any(f.short in knowledge.TAKES_FROM_WORKERS and knowledge.LOADER_FILE.search(f.file) for f in outer):
        return Wait.LOADER, ""
    return Wait.LIBRARY, ""


def _is_glue(frame: Frame, where: Origin) -> bool:
    if where is Origin.NATIVE:
        return True
    if where is Origin.OWN:
        return False
    return frame.short in knowledge.GLUE or bool(knowledge.GLUE_FILE.search(frame.file))


def read_frames(frames: Sequence[Frame], thread: str = "") -> Reading:
    """Read one stack, innermost frame first."""
    if not frames:
        return Reading(thread=thread)
    context, step = _phases(frames)
    own = next((frame for frame in frames if origin(frame) is Origin.OWN), None)
    names = frozenset(frame.short for frame in frames)
    native = _native_wait(frames)
    wait, op, telling, blocked_by = Wait.NOTHING, "", None, None
    for position, frame in enumerate(frames):
        where = origin(frame)
        callers = frames[position + 1 : position + 4]
        if where is Origin.UNKNOWN and any(origin(caller) is Origin.NATIVE for caller in callers):
            continue  # C functions without a file, below symbols of a library
        if _is_glue(frame, where):
            if where is Origin.STDLIB and knowledge.FINALIZER_FILES.search(frame.file):
                wait, telling = Wait.FINALIZER, frame
                break
            continue
        if where is Origin.STDLIB:
            if frame.short in knowledge.FINALIZER_FUNCTIONS:
                wait, telling = Wait.FINALIZER, frame
                break
            if phase_of(frame) is Phase.TEARDOWN:
                wait, telling = Wait.TEARDOWN, frame
                break
            blocked_by = frame
            continue
        telling = frame
        if where is Origin.OWN:
            wait = Wait.OWN
        elif where is Origin.UNKNOWN and frame.short in _BLOCKING_NAMES and not collective_of(frame):
            blocked_by = frame
            telling = None
            continue
        else:
            wait, op = _library_wait(frame, frames[position + 1 :])
        break
    if names & {"__call__"} and any(
        knowledge.FINALIZER_FILES.search(frame.file) for frame in frames if frame.short == "__call__"
    ):
        wait = Wait.FINALIZER
    if wait in IN_COLLECTIVE and names & knowledge.WEIGHT_SYNC_FUNCTIONS and "init_communicator" in names:
        wait = Wait.WEIGHT_SYNC
    if names & knowledge.GROUP_FUNCTIONS and "init_process_group" not in names and wait in _MAKING_A_GROUP:
        wait, op, native = Wait.COLLECTIVE, "new_group", Wait.NOTHING
    if native and wait in (Wait.OWN, Wait.LIBRARY, Wait.IMPLICIT, Wait.RENDEZVOUS):
        wait = native
    if telling is None:
        telling = next((frame for frame in frames if origin(frame) is not Origin.NATIVE), frames[0])
    phase = context or step
    return Reading(
        wait=wait,
        op=op or ("backward" if wait is Wait.IMPLICIT and telling.short in knowledge.BACKWARD_ENGINE else op),
        phase=phase,
        context=context,
        step=step,
        telling=telling,
        own=own,
        callers=tuple(frame for frame in frames if frame is not own and origin(frame) is Origin.OWN)[:16],
        blocked_by=blocked_by,
        for_children=any(knowledge.CHILD_FILE.search(frame.file) for frame in frames),
        thread=thread,
        names=names,
    )


# Blocking primitives of the standard library, for dumps that give names without files.
_BLOCKING_NAMES = frozenset(
    {
        "wait",
        "get",
        "acquire",
        "_recv",
        "_recv_bytes",
        "recv_bytes",
        "poll",
        "_poll",
        "select",
        "result",
        "join",
    }
    | {"__enter__", "read", "readinto", "accept", "sleep", "wait_for", "_wait_for_tstate_lock"}
)


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """The thread that runs the script: by name, else the one whose bottom is not a thread's bootstrap."""
    for thread in threads:
        if thread.name == "MainThread" and thread.frames:
            return thread
    for thread in threads:
        bottom = thread.frames[-1].short if thread.frames else ""
        if bottom in ("<module>", "_run_code", "_run_module_as_main", "main"):
            return thread
    with_frames = [thread for thread in threads if thread.frames]
    unbooted = [
        t for t in with_frames if not {"_bootstrap", "_bootstrap_inner"} & {f.short for f in t.frames[-3:]}
    ]
    candidates = unbooted or with_frames
    return max(candidates, key=lambda thread: len(thread.frames), default=None)


def autograd_threads(threads: Sequence[Thread], main: Thread | None) -> list[Thread]:
    """Threads that run backward for the main thread: Python frames, but no Thread.run below them."""
    found = []
    for thread in threads:
        if thread is main or not thread.frames:
            continue
        tail = {frame.short for frame in thread.frames[-4:]}
        if not tail & {"_bootstrap", "_bootstrap_inner", "run", "_worker_loop", "<module>"}:
            found.append(thread)
    return found


@lru_cache(maxsize=65536)
def _read_cached(frames: tuple[Frame, ...], thread: str) -> Reading:
    return read_frames(frames, thread)


def read_threads(threads: Sequence[Thread]) -> Reading:
    """Read a process: its main thread, joined with the autograd thread that works for its backward.

    A main thread inside backward with a collective on another thread is in that collective
    (huggingface/accelerate#3104); monitors, pin-memory and empty threads are left out.
    """
    main = main_thread(threads)
    if main is None:
        return Reading()
    reading = _read_cached(tuple(main.frames), main.name)
    if "_engine_run_backward" in reading.names or "backward" in reading.names:
        for thread in autograd_threads(threads, main):
            other = _read_cached(tuple(thread.frames), thread.name)
            if other.in_collective and other.op != "backward":
                return Reading(
                    wait=other.wait,
                    op=other.op,
                    phase=reading.context or Phase.BACKWARD,
                    context=reading.context,
                    step=Phase.BACKWARD,
                    telling=other.telling,
                    own=reading.own or other.own,
                    callers=reading.callers if reading.own else other.callers,
                    blocked_by=other.blocked_by,
                    thread=thread.name or "autograd",
                    names=reading.names | other.names,
                )
    return _communicating_thread(threads, main, reading) or reading


def read_thread(thread: Thread) -> Reading:
    """Read one thread by itself."""
    return _read_cached(tuple(thread.frames), thread.name)


def _communicating_thread(threads: Sequence[Thread], main: Thread, reading: Reading) -> Reading | None:
    """The thread in a collective that a main thread waits for: a queue, a future or a join has no peers."""
    waits = reading.blocked_by is not None and reading.blocked_by.short in _BLOCKING_NAMES
    if not waits or reading.wait not in (Wait.OWN, Wait.LIBRARY):
        return None
    others = [_read_cached(tuple(thread.frames), thread.name) for thread in threads if thread is not main]
    if any(other.own is not None and not other.in_collective for other in others):
        others = [other for other in others if other.own is not None]  # it may wait for the user's own thread
    communicating = [other for other in others if other.in_collective]
    if not communicating:
        return None
    chosen = next((other for other in communicating if other.own is not None), communicating[0])
    context = chosen.context or reading.context
    return replace(chosen, own=chosen.own or reading.own, context=context, phase=context or chosen.step)


def own_functions(threads: Sequence[Thread]) -> frozenset[tuple[str, str]]:
    """The user's own functions on the main thread's stack, by name and file."""
    main = main_thread(threads)
    if main is None:
        return frozenset()
    return frozenset((frame.short, frame.file) for frame in main.frames if origin(frame) is Origin.OWN)


def context_without(threads: Sequence[Thread], common: frozenset[tuple[str, str]]) -> Phase:
    """The surrounding phase, not counting own functions that every rank is in: those tell no rank apart."""
    main = main_thread(threads)
    if main is None:
        return Phase.UNKNOWN
    kept = [frame for frame in main.frames if (frame.short, frame.file) not in common]
    return _phases(kept)[0]


def user_frame(reading: Reading) -> Frame | None:
    """The frame to show for a culprit: the user's own innermost line, else the telling frame."""
    return reading.own or reading.telling
