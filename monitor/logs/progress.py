"""Step, loss and speed from the lines that trainers print.

Formats: transformers and TRL (and Axolotl, which is built on them) print a Python dict a log step and a
tqdm bar; DeepSpeed prints "step=…" and throughput lines; torchtitan "step: 10 loss: 7.1 …"; Megatron
"iteration 10/ 500 | … | lm loss: 1.0E+01 | …". JSON is read as well, NaN and Infinity included. A dict may
spread over several lines, and its values may be numbers, strings, numpy scalars or tensors as Python shows
them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ftdash.monitor.logs.lines import strip_ansi
from ftdash.monitor.logs.memory import LoggedMemory, parse_memory


@dataclass(frozen=True, slots=True)
class Progress:
    """What one line, or all lines so far, say; None where nothing was said. Times in seconds."""

    step: int | None = None
    max_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    tokens: int | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    mfu: float | None = None
    source: str = ""  # transformers, tqdm, deepspeed, torchtitan, megatron

    def over(self, older: Progress) -> Progress:
        """This line's values, the older ones where it has none."""
        missing = {
            item.name: getattr(older, item.name)
            for item in fields(self)
            if getattr(self, item.name) in (None, "")
        }
        return replace(self, **missing)


_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity|NAN|INF)"
_DICT = re.compile(r"\{[^{}]{3,4000}\}")
# 'loss': 2.3, 'loss': '2.3', 'loss': np.float64(2.3), 'loss': tensor(2.3, device='cuda:0')
_PAIR = re.compile(
    rf"""['"]([\w/ ()-]+)['"]\s*:\s*"""
    rf"""(?:[\w.]+\(({_NUMBER})(?:,[^(){{}}]*)?\)|['"]?({_NUMBER})['"]?)\s*(?=[,}}])"""
)
_DICT_BEGINS = re.compile(r"\{\s*(?:['\"][\w/ ()-]+['\"]\s*:[^{}]*)?$")  # and is closed on a later line
_MAX_DICT_CHARS = 4000
_TQDM = re.compile(
    r"(\d+)%\|[^|]*\|\s*(\d+)/(\d+)\s*\[(?:\d+:)?\d+:\d+<[^,\]]*"
    r"(?:,\s*([\d.?]+)\s*(s/)?(?:it|steps?|batch|ba)(/s)?)?((?:,[^\]]*)?)\]?"
)
_TQDM_PAIR = re.compile(rf"\b(\w+)=({_NUMBER})")
_DEEPSPEED_STEP = re.compile(r"\bstep=(\d+), skipped=\d+, lr=\[([^\],]+)")
_DEEPSPEED_SPEED = re.compile(
    rf"global_step=(\d+), RunningAvgSamplesPerSec=({_NUMBER}), CurrSamplesPerSec=({_NUMBER})"
)
_DEEPSPEED_LOSS = re.compile(
    rf"\bsteps: (\d+) loss: ({_NUMBER})(?: iter time \(s\): ({_NUMBER}))?"
    rf"(?: samples/sec: ({_NUMBER}))?"
)
_TITAN = re.compile(rf"\bstep:\s*(\d+)\s+loss:\s*({_NUMBER})(.*)")
_TITAN_PAIR = re.compile(rf"(grad_norm|tps|mfu|tflops):\s*({_NUMBER})")
_MEGATRON = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|(.*)")
_MEGATRON_PAIR = re.compile(rf"([A-Za-z][\w ()/.-]*?):\s*({_NUMBER})")

_KEYS: Mapping[str, str] = {
    "loss": "loss",
    "train_loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "lr": "lr",
    "epoch": "epoch",
    "step": "step",
    "global_step": "step",
    "num_tokens": "tokens",
    "tokens_per_second_per_gpu": "tokens_per_s",
    "tokens_per_sec_per_gpu": "tokens_per_s",
    "train_tokens_per_second": "tokens_per_s",
    "tokens/train_per_sec_per_gpu": "tokens_per_s",
    "tokens_per_second": "tokens_per_s",
}


def number(text: str) -> float | None:
    """A printed number, thousands separators and nan or inf included; None when it is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def parse(text: str) -> Progress | None:
    """What one line says about the training's progress; None for any other line."""
    line = strip_ansi(text)
    found = _megatron(line) or _titan(line) or _deepspeed(line) or _dictionary(line)
    bar = _tqdm(line)
    if found is not None and bar is not None and found.source == "transformers":
        return found.over(bar)  # the bar and the dict often stand on one line
    return found or bar


def _megatron(line: str) -> Progress | None:
    match = _MEGATRON.search(line)
    if match is None:
        return None
    said = {key.strip(): number(value) for key, value in _MEGATRON_PAIR.findall(match[3])}
    millis = said.get("elapsed time per iteration (ms)")
    step_s = millis / 1000 if millis else said.get("elapsed time per iteration (s)")
    samples = said.get("global batch size")
    return Progress(
        step=int(match[1]),
        max_steps=int(match[2]),
        loss=said.get("lm loss"),
        lr=said.get("learning rate"),
        grad_norm=said.get("grad norm"),
        tokens_per_s=said.get("tokens per gpu per second (tgs)"),
        step_s=step_s,
        samples_per_s=samples / step_s if samples and step_s else None,
        source="megatron",
    )


def _titan(line: str) -> Progress | None:
    match = _TITAN.search(line)
    if match is None:
        return None
    said = {key: number(value) for key, value in _TITAN_PAIR.findall(match[3])}
    mfu = said.get("mfu")
    return Progress(
        step=int(match[1]),
        loss=number(match[2]),
        grad_norm=said.get("grad_norm"),
        tokens_per_s=said.get("tps"),
        mfu=mfu / 100 if mfu is not None else None,
        source="torchtitan",
    )


def _deepspeed(line: str) -> Progress | None:
    if match := _DEEPSPEED_STEP.search(line):
        return Progress(step=int(match[1]), lr=number(match[2]), source="deepspeed")
    if match := _DEEPSPEED_SPEED.search(line):
        return Progress(step=int(match[1]), samples_per_s=number(match[3]), source="deepspeed")
    if match := _DEEPSPEED_LOSS.search(line):
        return Progress(
            step=int(match[1]),
            loss=number(match[2]),
            step_s=number(match[3] or ""),
            samples_per_s=number(match[4] or ""),
            source="deepspeed",
        )
    return None


def _dictionary(line: str) -> Progress | None:
    """What the dicts of a line say; of several that are glued together the last."""
    said: dict[str, float] = {}
    for pairs in _dictionaries(line):
        known: dict[str, float] = {}
        for key, value in pairs:
            name = _KEYS.get(key.strip())
            if name is not None:
                known.setdefault(name, value)
        if known.keys() & {"loss", "grad_norm"} and all(key != "train_runtime" for key, _ in pairs):
            said |= known  # the summary at the end has the run's mean loss, which is not the newest
    if not said:
        return None
    step, tokens = said.pop("step", None), said.pop("tokens", None)
    return Progress(
        step=int(step) if step is not None and math.isfinite(step) else None,
        tokens=int(tokens) if tokens is not None and math.isfinite(tokens) else None,
        epoch=said.get("epoch"),
        loss=said.get("loss"),
        lr=said.get("lr"),
        grad_norm=said.get("grad_norm"),
        tokens_per_s=said.get("tokens_per_s"),
        source="transformers",
    )


def _dictionaries(line: str) -> list[list[tuple[str, float]]]:
    """Keys and numbers of each printed dict or JSON object; numbers in quotes count as numbers."""
    at = line.find('{"')
    if at >= 0:
        try:
            data, _ = json.JSONDecoder().raw_decode(line, at)
        except (ValueError, RecursionError):
            data = None
        if isinstance(data, dict):
            pairs = [(key, _json_number(value)) for key, value in data.items()]
            return [[(key, value) for key, value in pairs if value is not None]]
    found = []
    for match in _DICT.finditer(line):
        said = ((key, number(inner or plain)) for key, inner, plain in _PAIR.findall(match[0]))
        found.append([(key, value) for key, value in said if value is not None])
    return found


def _json_number(value: object) -> float | None:
    if isinstance(value, str):
        return number(value)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _tqdm(line: str) -> Progress | None:
    """The newest frame of a bar; bars of data preparation look alike, so `max_steps` tells them apart."""
    frames = list(_TQDM.finditer(line))
    if not frames:
        return None
    match = frames[-1]
    rate = number(match[4] or "") or 0.0
    step_s = (rate if match[5] else 1.0 / rate) if rate and bool(match[5]) != bool(match[6]) else None
    said = {_KEYS.get(key): number(value) for key, value in _TQDM_PAIR.findall(match[7])}
    return Progress(
        step=int(match[2]),
        max_steps=int(match[3]),
        step_s=step_s,
        loss=said.get("loss"),
        lr=said.get("lr"),
        grad_norm=said.get("grad_norm"),
        source="tqdm",
    )


_OTHER_BARS = re.compile(
    r"\b(?:Map|Filter|Generating|Downloading|Loading|Tokeniz|Packing|Adding|Fetching|Saving|Writing|Evaluat|Validat|Resolving"
    r"|Convert|Applying|Truncat|num_proc|shards|examples/s|files)",
    re.IGNORECASE,
)


class ProgressFollower:
    """Merges the progress of one log's lines. Bars that are not the training's own are left out."""

    def __init__(self) -> None:
        self.latest = Progress()
        self.memory: LoggedMemory | None = None  # as last printed
        self._counted: tuple[int, int] | None = None  # step and tokens of the newest counter line
        self._tokens_per_step: float | None = None
        self._open_dict = ""  # lines of a dict that is not closed yet
        self._shorter_bar: Progress | None = None  # shorter than the training's as known so far
        self.hidden_nan = False  # a gradient norm was not finite while the printed loss was

    def feed(self, line: str, *, ended: bool = True) -> bool:
        """Take one line; True when it told something. With `ended` False it is the beginning of one."""
        if memory := parse_memory(line):
            self.memory = memory.over(self.memory) if self.memory is not None else memory
        found = parse(self._with_its_dict(line) if ended else line)
        if found is None or (found.source == "tqdm" and self._of_something_else(found, line)):
            return memory is not None
        if found.source != "tqdm":
            self._confirm_bar()
        if found.grad_norm is not None and not math.isfinite(found.grad_norm):
            self.hidden_nan = self.hidden_nan or (found.loss is not None and math.isfinite(found.loss))
        source = found.source if found.source != "tqdm" else self.latest.source or "tqdm"
        self.latest = replace(found.over(self.latest), source=source)
        if found.tokens is not None:
            self._note_tokens(found.tokens)
        return True

    def _with_its_dict(self, line: str) -> str:
        """The line, with those before it when they began a dict that it ends; "" while that goes on."""
        if self._open_dict and len(self._open_dict) < _MAX_DICT_CHARS and "{" not in line:
            whole = f"{self._open_dict} {line.strip()}"
            self._open_dict = "" if "}" in line else whole
            return "" if self._open_dict else whole
        begun = _DICT_BEGINS.search(strip_ansi(line)) if "{" in line else None
        self._open_dict = begun[0] if begun is not None else ""
        return line

    def _of_something_else(self, bar: Progress, line: str) -> bool:
        """A bar of data preparation, or a shorter one than the training's, as evaluations show them."""
        if _OTHER_BARS.search(line):
            return True
        if bar.loss is not None or (bar.max_steps or 0) >= (self.latest.max_steps or 0):
            self._shorter_bar = None
            return False
        self._shorter_bar = bar
        return True

    def _confirm_bar(self) -> None:
        """A loss is logged while only a shorter bar moves: it is the training's, begun again shorter."""
        if self._shorter_bar is not None:
            self.latest = self._shorter_bar.over(self.latest)
            self._shorter_bar = None

    def tokens_per_s(self) -> float | None:
        """As printed, else from the token counter, the steps between two of its lines, and the step time."""
        latest = self.latest
        if latest.tokens_per_s is not None:
            return latest.tokens_per_s
        if self._tokens_per_step is None or not latest.step_s:
            return None
        return self._tokens_per_step / latest.step_s

    def _note_tokens(self, tokens: int) -> None:
        step = self.latest.step
        if step is None:
            return
        if self._counted is not None:
            before_step, before_tokens = self._counted
            if step > before_step and tokens >= before_tokens:
                self._tokens_per_step = (tokens - before_tokens) / (step - before_step)
        self._counted = (step, tokens)
