"""What a secret is, by its name and by its shape, and texts without them: the one place that decides."""

from __future__ import annotations

import re

import msgspec

from autotune.policies.values.diagnosis import Line

MASK = "***"

# Shapes that providers give their keys; each alternative begins with a literal, so that one pass suffices.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,256}|api_org_[A-Za-z0-9]{16,256}|sk-[A-Za-z0-9_\-]{16,256}"
    r"|gh[pousr]_[A-Za-z0-9]{20,256}|github_pat_[A-Za-z0-9_]{20,256}|glpat-[A-Za-z0-9_\-]{16,256}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[0-9A-Za-z_\-]{30,64}|xox[abeprs]-[A-Za-z0-9\-]{10,256}"
    r"|nvapi-[A-Za-z0-9_\-]{16,256}|npm_[A-Za-z0-9]{30,64}|pypi-[A-Za-z0-9_\-]{16,512}"
    r"|hooks\.slack\.com/services/[A-Za-z0-9/_\-]{8,256}|discord(?:app)?\.com/api/webhooks/[A-Za-z0-9/_\-]{8,256}"
    r"|local-[0-9a-f]{40}|wandb_v\d_[A-Za-z0-9_]{20,256}|eyJ[A-Za-z0-9_\-]{10,4096}\.[A-Za-z0-9_\-]{10,4096}\.[A-Za-z0-9_\-]{0,4096})"
)
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)"
    r"(?:[^-]{0,20000}-----END [A-Z ]{0,40}PRIVATE KEY-----|.{0,20000})",
    re.DOTALL,
)
_USER_INFO = re.compile(r"(://[^\s/@:'\"]{0,200}:)[^\s/@'\"]{1,400}@")
_HEADER = re.compile(
    r"(?i)\b((?:bearer|basic)\s{1,4}|authorization['\"]?\s{0,4}[:=]\s{0,4}['\"]?(?:token|bearer|basic)?\s{0,4})"
    r"(?!(?:token|bearer|basic)\b)"
    r"(?=[A-Za-z0-9+/=_\-.~]{0,4096}(?-i:[0-9A-Z=_\-]))([A-Za-z0-9+/=_\-.~]{6,4096})"
)
# The key behind `wandb login` and its options.
_LOGIN = re.compile(r"(\bwandb\s{1,4}login\s{1,4}(?:--\S{1,40}\s{1,4}){0,4})([A-Za-z0-9_\-]{20,256})")
# A name that ends in one of these words, what stands between, and its value: `NAME=x`, `"name": "x"`,
# `--name x`, `name ........ x`. The names' beginnings are judged in `_value`, since a pattern for them could
# be tried from every character of a long word.
_NAMED = re.compile(
    r"(?P<word>(?i:passw(?:or)?d|passwd|passphrase|pwd|secret(?:[_\-]?(?:access)?[_\-]?key)?|token|api[_\-]?key"
    r"|access[_\-]?key(?:[_\-]?id)?|private[_\-]?key|auth[_\-]?key|wandb[_\-]?key|credentials?|signature)|_KEY)"
    r"(?P<between>\\{0,3}['\"]?\s{0,4}[=:]\s{0,4}(?:[bru](?=['\"]))?|\s{1,4}\.{3,200}\s{0,4}|['\"],?\s{1,4}|\s{1,4})"
    r"(?P<quote>\\{0,3}['\"])?(?P<value>(?(quote)[^'\"\n]{1,4096}|[^\s,;'\"&)}\]]{1,4096}))"
)
# Whole words only: TOKENIZERS_PARALLELISM is no secret.
_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:_|$)", re.IGNORECASE
)
# Of flags and settings: `data.prompt_key` and `eos_token` are none.
_SETTING = re.compile(
    r"(?:^|[-_.])(?:(?:wandb|swanlab|api|hf|hub|huggingface|github|gitlab|openai|access|auth|bearer|private|secret)"
    r"[-_]?(?:api[-_]?|access[-_]?)?(?:key|token)|password|passwd|passphrase|secret|credentials?)$",
    re.IGNORECASE,
)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
# 40 hexadecimal digits are a key of W&B or a revision of git, and no other word tells which.
_RANDOM = re.compile(r"(?<![\w@./+-])[0-9a-f]{40}(?![\w-])")
_OF_REVISION = re.compile(
    r"(?i)(?:^|[^a-z])(?:rev|revision|commit|sha\d{0,3}|hash|digest|checksum|version|ref|tag|git\b[^;|&]{0,80})[^a-z]{0,3}$"
)
_NAME_REACH = 64  # characters before the word that may belong to the name
# No secrets: words for none, references to variables, what a shell fetches by a command, numbers.
_PLAIN = re.compile(
    r"(?i)(none|null|true|false|\*+|<\w+>|\$\{?\w+.{0,20}|(?:\$\(|`).*|-?\d+(\.\d+)?(e[+-]?\d+)?%?)$"
)
_NAME_END = re.compile(r"[A-Za-z0-9_.\-]*$")
# Tokens of a vocabulary, and counts of tokens.
_VOCABULARY = re.compile(
    r"(?i)(^|[_.\-])(eos|bos|pad|unk|sep|cls|mask|image|video|audio|vision|next|new|start|end|stop|special|think"
    r"|prefix|suffix|decoder_start|eot|per|max|min|num|of|first|last|each|added|bad|tool|by|forced)[_\-]?$"
)
_TOKEN_LIKE = re.compile(r"(?=.*\d)[A-Za-z0-9+/=_\-.~:]{8,}$|[A-Za-z0-9+/=_\-.~:]{24,}$")


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable of this name holds a secret."""
    return _VARIABLE.search(name) is not None


def is_secret_setting(name: str) -> bool:
    """Return whether a setting or flag of this name, dotted or dashed, holds a secret."""
    return _SETTING.search(name) is not None


def has_shape(value: str, *, name: str = "") -> bool:
    """Return whether a value looks like a provider's key, a private key or a URL with a password."""
    if "wandb" in name.lower() and _WANDB_KEY.fullmatch(value):
        return True
    return bool(_SHAPES.search(value) or _PRIVATE_KEY.search(value) or _USER_INFO.search(value))


def random_looking(text: str, *, name: str = "") -> tuple[str, ...]:
    """Return the parts of a text that may be keys or may be revisions of git, where no word says revision."""
    found = ((match[0], text[: match.start()] or name) for match in _RANDOM.finditer(text))
    return tuple(part for part, before in found if _OF_REVISION.search(before) is None)


def masked(text: str) -> str:
    """Return a text with its passwords, keys and tokens replaced by `***`; takes linear time."""
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(rf"\1{MASK}", text)
    text = _SHAPES.sub(MASK, text)
    if "://" in text:
        text = _USER_INFO.sub(rf"\1{MASK}@", text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    if "wandb" in text:
        text = _LOGIN.sub(rf"\1{MASK}", text)
    return _NAMED.sub(_hidden, text)


def one_line(text: str, *, longest: int) -> str:
    """Return a text as one line without secrets and control characters, of `longest` characters at most."""
    line = " ".join("".join(c if c.isprintable() else " " for c in masked(text)).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def shown(line: Line) -> Line:
    """Return a line of a log as it may be stored and printed."""
    return msgspec.structs.replace(line, text=masked(line.text))


def _hidden(match: re.Match[str]) -> str:
    begin = match.start("word")
    name_end = _NAME_END.search(match.string[max(0, begin - _NAME_REACH) : begin])
    name = name_end[0] if name_end else ""
    if not _is_secret(name, match):
        return match[0]
    return f"{match['word']}{match['between']}{match['quote'] or ''}{MASK}"


def _is_secret(name: str, match: re.Match[str]) -> bool:
    """Return whether a name that ends so, written so, has a secret for its value."""
    word, between, value = match["word"], match["between"], match["value"]
    flag = name.startswith("--")
    assigned = "=" in between or ":" in between or "..." in between
    if not assigned and not flag:
        return False
    upper = (name + word).isupper() and "_" in name + word
    is_token = word.lower() == "token"
    if is_token and _VOCABULARY.search(name):
        return False
    if word == "_KEY" and not upper:
        return False
    if word.lower() in ("pwd", "signature", "credential", "credentials") and (
        word == "PWD"
        or _PLAIN.match(value)
        or "(" in value
        or (word.lower() == "signature" and not flag and len(value) < 16)
    ):
        return False
    if _PLAIN.match(value):
        return word.lower().startswith("passw") and value[:1].isdigit()
    if flag and value.startswith("-"):
        return False
    return not is_token or upper or flag or _TOKEN_LIKE.match(value) is not None
