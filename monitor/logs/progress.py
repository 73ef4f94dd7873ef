"""Step, loss and speed from the lines that trainers print.

Formats: transformers and TRL (and Axolotl, which is built on them) print a Python dict a log step and a
tqdm bar; DeepSpeed prints "step=…" and throughput lines; torchtitan "step: 10 loss: 7.1 …"; Megatron
"iteration 10/ 500 | … | lm loss: 1.0E+01 | …". JSON lines are read as well, NaN and Infinity included.
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
_PAIR = re.compile(rf"""['"]([\w/ ()-]+)['"]\s*:\s*['"]?({_NUMBER})['"]?\s*(?=[,}}])""")
_TQDM = re.compile(
    r"(\d+)%\|[^|]*\|\s*(\d+)/(\d+)\s*\[(?:\d+:)?\d+:\d+<[^,\]]*(?:,\s*([\d.]+)\s*(it/s|s/it))?"
)
_DEEPSPEED_STEP = re.compile(r"\bstep=(\d+), skipped=\d+, lr=\[([^\],]+)")
_DEEPSPEED_SPEED = re.compile(
    rf"global_step=(\d+), RunningAvgSamplesPerSec=({_NUMBER}), CurrSamplesPerSec=({_NUMBER})"
)
_DEEPSPEED_LOSS = re.compile(rf"\bsteps: (\d+) loss: ({_NUMBER})(?: iter time \(s\): ({_NUMBER}))?")
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
    step_s = millis / 1000 if millis else None
    samples = said.get("global batch size")
    return Progress(
        step=int(match[1]),
        max_steps=int(match[2]),
        loss=said.get("lm loss"),
        lr=said.get("learning rate"),
        grad_norm=said.get("grad norm"),
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
        step_s = number(match[3]) if match[3] else None
        return Progress(step=int(match[1]), loss=number(match[2]), step_s=step_s, source="deepspeed")
    return None


def _dictionary(line: str) -> Progress | None:
    match = _DICT.search(line)
    if match is None:
        return None
    said: dict[str, float] = {}
    for key, value in _pairs(match[0]):
        name = _KEYS.get(key.strip())
        if name is not None and name not in said:
            said[name] = value
    if not said.keys() & {"loss", "grad_norm"}:
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


def _pairs(text: str) -> list[tuple[str, float]]:
    """Keys and numbers of a printed dict or JSON object; numbers in quotes count as numbers."""
    if text.startswith('{"'):
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if isinstance(data, dict):
            return [(k, float(v)) for k, v in data.items() if isinstance(v, int | float)]
    pairs = ((key, number(value)) for key, value in _PAIR.findall(text))
    return [(key, value) for key, value in pairs if value is not None]


def _tqdm(line: str) -> Progress | None:
    """The newest frame of a bar; bars of data preparation look alike, so `max_steps` tells them apart."""
    frames = list(_TQDM.finditer(line))
    if not frames:
        return None
    match = frames[-1]
    rate = float(match[4]) if match[4] else 0.0
    step_s = (1.0 / rate if match[5] == "it/s" else rate) if rate else None
    return Progress(step=int(match[2]), max_steps=int(match[3]), step_s=step_s, source="tqdm")


_OTHER_BARS = re.compile(
    r"\b(?:Map|Filter|Generating|Downloading|Loading|Tokeniz|Packing|Adding|Fetching|Saving|Evaluat|Resolving"
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
        self.hidden_nan = False  # a gradient norm was not finite while the printed loss was

    def feed(self, line: str) -> bool:
        """Take one line; True when it told something."""
        if memory := parse_memory(line):
            self.memory = memory.over(self.memory) if self.memory is not None else memory
        found = parse(line)
        if found is None or (found.source == "tqdm" and _OTHER_BARS.search(line)):
            return memory is not None
        if found.grad_norm is not None and not math.isfinite(found.grad_norm):
            self.hidden_nan = self.hidden_nan or (found.loss is not None and math.isfinite(found.loss))
        source = found.source if found.source != "tqdm" else self.latest.source or "tqdm"
        self.latest = replace(found.over(self.latest), source=source)
        if found.tokens is not None:
            self._note_tokens(found.tokens)
        return True

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
