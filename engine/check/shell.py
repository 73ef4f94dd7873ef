"""A launch script read without running it: #SBATCH options, commands, and which shell expands what."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ftdash.engine.check.documents import words

_ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+|readonly\s+)?([A-Za-z_]\w*)=")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=][^}]*)?\}|(\w+))")
_SPLIT = ("&&", "||", ";", "|", "&", "(", ")", "{", "}")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python")
_SBATCH_SHORT = {
    "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-G": "--gpus", "-t": "--time",
    "-p": "--partition",
}  # fmt: skip
_SRUN_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-G": "--gpus", "-w": "--nodelist"}


@dataclass(frozen=True, slots=True)
class Word:
    """One shell word: `text` without quotes; `expanded` are variables this shell itself replaces."""

    text: str
    expanded: frozenset[str]
    single: bool = False  # wholly in single quotes


@dataclass(frozen=True, slots=True)
class Command:
    words: tuple[Word, ...]
    line: int
    background: bool = False
    env: dict[str, Word] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]

    @property
    def program(self) -> str:
        return self.words[0].text.rsplit("/", 1)[-1] if self.words else ""

    def option(self, *names: str) -> str | None:
        """The value of `--name V` or `--name=V`; dashes and underscores are the same."""
        return option_of(self.texts, *names)


@dataclass(frozen=True, slots=True)
class Launch:
    """A training launch: `launcher` is torchrun, accelerate, deepspeed, axolotl or python."""

    launcher: str
    argv: tuple[str, ...]
    line: int
    srun: Command | None
    deferred: bool  # its text is expanded by each task's own shell (bash -c '...')
    expanded: frozenset[str]  # variables that the batch shell replaces before srun starts
    background: bool

    def option(self, *names: str) -> str | None:
        return option_of(list(self.argv), *names)

    def has(self, *names: str) -> bool:
        wanted = {_norm(name) for name in names}
        return any(_norm(text.split("=", 1)[0]) in wanted for text in self.argv)


class Shell:
    """A parsed shell script. Variables are followed as far as they hold plain text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sbatch: dict[str, tuple[str, int]] = {}
        self.variables: dict[str, tuple[Word, int]] = {}
        self.exported: set[str] = set()
        self.commands: list[Command] = []
        self._directives()
        for logical, line in _logical_lines(text):
            self._line(logical, line)
        self.launches = [launch for command in self.commands for launch in self._launches(command)]

    @property
    def is_batch(self) -> bool:
        return bool(self.sbatch) or "SLURM_" in self.text

    def expand(self, text: str, depth: int = 4) -> str:
        """Replace variables that hold known text; the others stay as they are written."""
        for _ in range(depth):
            replaced = _VARIABLE.sub(self._replacement, text)
            if replaced == text:
                return text
            text = replaced
        return text

    def number(self, text: str | None) -> int | None:
        if text is None:
            return None
        expanded = self.expand(text).strip().strip("\"'")
        return int(expanded) if expanded.isdigit() else None

    def environment(self, launch: Launch, name: str) -> str:
        """A variable as the launch sees it: set before its own command, or earlier in the script."""
        own = (command.env.get(name) for command in self.commands if command.line == launch.line)
        earlier = self.variables[name][0] if name in self.variables else None
        word = next((word for word in own if word is not None), earlier)
        return self.expand(word.text) if word is not None else ""

    def sbatch_number(self, name: str) -> int | None:
        found = self.sbatch.get(name)
        match = re.match(r"\d+", self.expand(found[0])) if found else None
        return int(match.group()) if match else None

    @property
    def nodes(self) -> int | None:
        return self.sbatch_number("--nodes")

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs on each node, from --gpus-per-node or --gres=gpu[:type]:N."""
        for name in ("--gpus-per-node", "--gres"):
            if found := self.sbatch.get(name):
                value = self.expand(found[0])
                if name == "--gres" and "gpu" not in value:
                    continue
                if match := re.search(
                    r"(?:^|:|=)(\d+)(?:$|,|\()", value if name != "--gres" else value + ","
                ):
                    return int(match.group(1))
                return 1 if name == "--gres" else None
        if (gpus := self.sbatch_number("--gpus")) and self.nodes:
            return gpus // self.nodes
        return None

    @property
    def tasks_per_node(self) -> int | None:
        if (tasks := self.sbatch_number("--ntasks-per-node")) is not None:
            return tasks
        tasks = self.sbatch_number("--ntasks")
        if tasks is None:
            return None
        return max(1, tasks // (self.nodes or 1))

    def _replacement(self, match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name in self.variables:
            word = self.variables[name][0].text
            if not re.search(rf"\b{name}\b", word):
                return word
        return match.group(0)

    def _directives(self) -> None:
        for number, line in enumerate(self.text.splitlines(), 1):
            match = re.match(r"^#SBATCH\s+(.*)$", line)
            if not match:
                continue
            for name, value in _options(re.sub(r"\s+#.*$", "", match.group(1)).split(), _SBATCH_SHORT):
                self.sbatch[name] = (value, number)

    def _line(self, text: str, line: int) -> None:
        words: list[Word] = []
        env: dict[str, Word] = {}
        for token in _tokens(text):
            if isinstance(token, str):
                self._finish(words, env, line, token == "&")
                words, env = [], {}
            else:
                words.append(token)
        self._finish(words, env, line, False)

    def _finish(self, words: list[Word], env: dict[str, Word], line: int, background: bool) -> None:
        export = bool(words) and words[0].text in ("export", "declare", "readonly", "local", "typeset")
        rest = words[1:] if export else words
        index = 0
        while index < len(rest) and (match := _ASSIGNMENT.match(rest[index].text)):
            name = match.group(1)
            word = rest[index]
            value = Word(word.text[match.end() :], word.expanded, word.single)
            env[name] = value
            index += 1
        remaining = rest[index:]
        if export or not remaining:
            for name, value in env.items():
                self.variables[name] = (value, line)
                if export:
                    self.exported.add(name)
            if export:
                self.exported.update(word.text for word in remaining if re.fullmatch(r"\w+", word.text))
                return
        if remaining and remaining[0].text in (
            "if",
            "then",
            "else",
            "do",
            "while",
            "!",
            "time",
            "exec",
            "nohup",
        ):
            remaining = remaining[1:]
        if remaining:
            self.commands.append(Command(tuple(remaining), line, background, env))

    def _launches(self, command: Command) -> list[Launch]:
        srun = command if command.program == "srun" else None
        words = list(command.words)
        if srun:
            words = _after_options(words[1:], _SRUN_SHORT)
        expanded = frozenset().union(*(word.expanded for word in words)) if words else frozenset()
        texts: list[str] = []
        deferred = False
        if len(words) >= 3 and words[0].text.rsplit("/", 1)[-1] in ("bash", "sh") and "c" in words[1].text:
            deferred = True
            inner = words[2]
            texts = _plain_words(self._spread(inner, expanded)[0])
            expanded = inner.expanded
        else:
            for word in words:
                text, more = self._spread(word, frozenset())
                expanded |= more
                texts += _plain_words(text) if text != word.text else [text]
        found = _find_launcher(texts)
        if found is None:
            return []
        launcher, argv = found
        return [Launch(launcher, tuple(argv), command.line, srun, deferred, expanded, command.background)]

    def _spread(self, word: Word, expanded: frozenset[str]) -> tuple[str, frozenset[str]]:
        """A word with known variables replaced, and the variables that their own definitions expanded."""
        if word.single:
            return word.text, expanded
        more = set(expanded)
        pending = list(word.expanded)
        while pending:
            name = pending.pop()
            if name not in more:
                more.add(name)
                pending.extend(self.variables[name][0].expanded if name in self.variables else ())
        return self.expand(word.text), frozenset(more)


def _norm(name: str) -> str:
    return "--" + name.lstrip("-").replace("_", "-")


def option_of(texts: list[str], *names: str) -> str | None:
    wanted = {_norm(name) for name in names}
    for index, text in enumerate(texts):
        key, equals, value = text.partition("=")
        if text.startswith("-") and _norm(key) in wanted:
            if equals:
                return value
            following = texts[index + 1] if index + 1 < len(texts) else ""
            return "" if re.match(r"--?[A-Za-z]", following) else following
    return None


def _options(texts: list[str], short: dict[str, str]) -> list[tuple[str, str]]:
    found = []
    index = 0
    while index < len(texts):
        text = texts[index]
        key, equals, value = text.partition("=")
        if not equals:
            if re.fullmatch(r"-[A-Za-z]\d+", key):
                key, value = key[:2], key[2:]
            elif index + 1 < len(texts) and not texts[index + 1].startswith("-"):
                value = texts[index + 1]
                index += 1
        found.append((short.get(key, key), value.strip("\"'")))
        index += 1
    return found


# srun options that take no value; every other option without "=" is followed by one.
_SRUN_FLAGS = words(
    "--exclusive --overlap --label -l --unbuffered -u --verbose -v --exact --no-kill -k --quiet -Q "
    "--wait-all-nodes --pty --overcommit -O --kill-on-bad-exit -K"
)


def _after_options(words: list[Word], short: dict[str, str]) -> list[Word]:
    index = 0
    while index < len(words) and words[index].text.startswith("-"):
        text = words[index].text
        takes = "=" not in text and text not in _SRUN_FLAGS and not re.fullmatch(r"-[A-Za-z]\d+", text)
        index += 2 if takes else 1
    return words[index:]


def _find_launcher(texts: list[str]) -> tuple[str, list[str]] | None:
    for index, text in enumerate(texts):
        base = text.rsplit("/", 1)[-1]
        if base == "accelerate" and texts[index + 1 : index + 2] == ["launch"]:
            return "accelerate", texts[index + 2 :]
        if base == "axolotl" and texts[index + 1 : index + 2] == ["train"]:
            return "axolotl", texts[index + 2 :]
        if base in ("torchrun", "deepspeed"):
            return base, texts[index + 1 :]
        if re.fullmatch(r"python[\d.]*", base):
            rest = texts[index + 1 :]
            if "-m" in rest:
                module = rest[rest.index("-m") + 1 :][:1]
                after = rest[rest.index("-m") + 2 :]
                if module in (["torch.distributed.run"], ["torch.distributed.launch"]):
                    return "torchrun", after
                if module == ["accelerate.commands.launch"]:
                    return "accelerate", after
                if module == ["deepspeed.launcher.runner"]:
                    return "deepspeed", after
            if any(part.endswith(".py") for part in rest) or "-m" in rest:
                return "python", rest
            return None
        if base in ("echo", "printf", "scancel", "scontrol", "pip", "cd", "mkdir", "cp", "source", "grep"):
            return None
    return None


def _logical_lines(text: str) -> list[tuple[str, int]]:
    """Lines with continuations and open quotes joined, comments and here-documents dropped."""
    result = []
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        start = index + 1
        current = lines[index]
        index += 1
        while index < len(lines) and (current.endswith("\\") or _open_quote(current)):
            current = (
                current[:-1] + " "
                if current.endswith("\\") and _open_quote(current) != "'"
                else current + "\n"
            )
            current += lines[index]
            index += 1
        here = re.search(r"<<-?\s*[\"']?(\w+)[\"']?", current)
        if here and "<<<" not in current:
            while index < len(lines) and lines[index].strip() != here.group(1):
                index += 1
            index += 1
        stripped = current.strip()
        if stripped and not stripped.startswith("#"):
            result.append((current, start))
    return result


def _open_quote(text: str) -> str:
    quote = ""
    index = 0
    while index < len(text):
        char = text[index]
        if char == "\\" and quote != "'":
            index += 2
            continue
        if quote:
            if char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "#" and (index == 0 or text[index - 1].isspace()):
            return ""
        index += 1
    return quote


def _tokens(text: str) -> list[Word | str]:
    """Words and control operators. `$(...)` stays one piece, its variables count as expanded here."""
    tokens: list[Word | str] = []
    buffer = ""
    expanded: set[str] = set()
    quoted = single_only = False
    started = False
    index = 0

    def flush() -> None:
        nonlocal buffer, expanded, started, quoted, single_only
        if started:
            tokens.append(Word(buffer, frozenset(expanded), quoted and single_only))
        buffer, expanded, started, quoted, single_only = "", set(), False, False, False

    while index < len(text):
        char = text[index]
        if char == "#" and not started:
            break
        if char.isspace():
            flush()
            index += 1
        elif char == "'":
            end = text.find("'", index + 1)
            end = len(text) if end < 0 else end
            single_only = not started or single_only
            started = quoted = True
            buffer += text[index + 1 : end]
            index = end + 1
        elif char == '"':
            started, single_only, quoted = True, False, True
            index += 1
            while index < len(text) and text[index] != '"':
                if text[index] == "\\" and index + 1 < len(text):
                    buffer += text[index + 1] if text[index + 1] in '$`"\\\n' else text[index : index + 2]
                    index += 2
                    continue
                end = _piece_end(text, index, expanded)
                buffer += text[index:end]
                index = end
            index += 1
        elif char == "\\" and index + 1 < len(text):
            started = True
            buffer += text[index + 1]
            index += 2
        elif char == "$" or char == "`":
            started, single_only = True, False
            end = _piece_end(text, index, expanded)
            buffer += text[index:end]
            index = end
        elif text[index : index + 2] in _SPLIT:
            flush()
            tokens.append(text[index : index + 2])
            index += 2
        elif char in _SPLIT and not (char in "{}" and started) and not (char == "&" and buffer.endswith(">")):
            flush()
            tokens.append(char)
            index += 1
        else:
            started, single_only = True, False
            buffer += char
            index += 1
    flush()
    return tokens


def _piece_end(text: str, index: int, expanded: set[str]) -> int:
    """The end of the piece at `index`: a variable, a command substitution, or one character."""
    if text[index] == "`":
        end = text.find("`", index + 1)
        end = len(text) if end < 0 else end + 1
        expanded.update(name for pair in _VARIABLE.findall(text[index:end]) for name in pair if name)
        return end
    if text.startswith("$(", index):
        depth, end = 0, index + 1
        while end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        expanded.update(re.findall(r"\$?\{?\b([A-Z_][A-Z0-9_]+)\b", text[index:end]))
        return end
    if match := re.compile(r"\$\{[^}]*\}|\$\w+").match(text, index):
        expanded.update(re.findall(r"\w+", match.group())[:1])
        return match.end()
    return index + 1


def _plain_words(text: str) -> list[str]:
    return [token.text for token in _tokens(text.replace("\n", " ")) if isinstance(token, Word)]
