"""Takes secrets out of a command line before it is written down."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"

# Flags whose last word says that a secret follows; the special tokens of a tokenizer are none.
_SECRET_FLAG = re.compile(
    r"(?:^|[_.])(?:token|secret|password|passwd|passphrase|credentials?|auth|bearer"
    r"|(?:api|access|private|secret|wandb|hf|hub|openai|auth|ssh|aws|comet|mlflow|neptune)_?key)$",
    re.IGNORECASE,
)
_PLAIN_TOKEN = re.compile(
    r"(?:^|[_.])(?:eos|bos|pad|unk|sep|cls|mask|image|audio|video|stop|start|end|per|think)_token$",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"^(?P<name>-{0,2}[A-Za-z_][\w.\-]*)=(?P<value>.*)$", re.DOTALL)
# Secrets by their own form: hub, GitHub, OpenAI-like, AWS and Slack keys, and passwords inside of URLs.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|sk-[A-Za-z0-9_\-]{16,}"
    r"|AKIA[A-Z0-9]{12,}|xox[abprs]-[A-Za-z0-9\-]{10,})\b"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_JSON_SECRET = re.compile(
    r"(?P<head>[\"']\w*(?:token|api_?key|secret|password)[\"']\s*[:=]\s*)(?P<quote>[\"'])(?:(?!(?P=quote)).)*(?P=quote)",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def redact_command(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command without secrets: after a telling flag, by their form, or as `environ` names them."""
    known = sorted(
        {value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= 8},
        key=len,
        reverse=True,
    )
    shown: list[str] = []
    secret_follows = False
    for word in command:
        if secret_follows and not word.startswith("--"):
            shown.append(HIDDEN)
            secret_follows = False
            continue
        secret_follows = word.startswith("-") and "=" not in word and _is_secret_flag(word)
        shown.append(_redact_word(word, known))
    return shown


def _is_secret_flag(flag: str) -> bool:
    name = flag.lstrip("-").replace("-", "_")
    return bool(_SECRET_FLAG.search(name)) and not _PLAIN_TOKEN.search(name)


def _redact_word(word: str, known: Sequence[str]) -> str:
    if (match := _ASSIGNMENT.match(word)) and _is_secret_flag(match["name"]):
        return f"{match['name']}={HIDDEN}"
    for secret in known:
        word = word.replace(secret, HIDDEN)
    word = _SECRET_VALUE.sub(HIDDEN, word)
    word = _URL_PASSWORD.sub(HIDDEN, word)
    return _JSON_SECRET.sub(lambda m: f"{m['head']}{m['quote']}{HIDDEN}{m['quote']}", word)
