"""Detects secrets by name and by shape, and masks them; the only module that defines what a secret is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from autotune.policies.values.diagnosis import Line

MASK = "***"


class Grade(IntEnum):
    """The certainty that a value is a secret."""

    RANDOM = 0  # 40 hexadecimal digits: a W&B key or a git revision
    LIKELY = 1  # masked in logs; too many settings have such names to refuse them
    CERTAIN = 2  # a secret's name with a value that is no placeholder, or a provider's key format


class Secret(NamedTuple):
    """A part of a text that is a secret."""

    start: int
    end: int
    variable: str  # the environment variable that usually holds it
    grade: Grade


# Formats of providers' keys; each alternative begins with a literal, so that one scan suffices.
_SHAPES = re.compile(
    r"\b(?:(?P<HF_TOKEN>hf_[A-Za-z0-9]{16,256}|api_org_[A-Za-z0-9]{16,256})"
    r"|(?P<API_KEY>sk-[A-Za-z0-9_\-]{16,256}|AIza[0-9A-Za-z_\-]{30,64})"
    r"|(?P<GITHUB_TOKEN>gh[pousr]_[A-Za-z0-9]{20,256}|github_pat_[A-Za-z0-9_]{20,256})"
    r"|(?P<GITLAB_TOKEN>glpat-[A-Za-z0-9_\-]{16,256})|(?P<AWS_ACCESS_KEY_ID>(?:AKIA|ASIA)[0-9A-Z]{16})"
    r"|(?P<SLACK_TOKEN>xox[abeprs]-[A-Za-z0-9\-]{10,256})|(?P<NVIDIA_API_KEY>nvapi-[A-Za-z0-9_\-]{16,256})"
    r"|(?P<NPM_TOKEN>npm_[A-Za-z0-9]{30,64})|(?P<PYPI_TOKEN>pypi-[A-Za-z0-9_\-]{16,512})"
    r"|(?P<WEBHOOK_URL>hooks\.slack\.com/services/[A-Za-z0-9/_\-]{8,256}"
    r"|discord(?:app)?\.com/api/webhooks/[A-Za-z0-9/_\-]{8,256})"
    r"|(?P<WANDB_API_KEY>local-[0-9a-f]{40}|wandb_v\d_[A-Za-z0-9_]{20,256})"
    r"|(?P<TOKEN>eyJ[A-Za-z0-9_\-]{10,4096}\.[A-Za-z0-9_\-]{10,4096}\.[A-Za-z0-9_\-]{0,4096}))"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----"
    r"(?P<PRIVATE_KEY>[^-]{0,20000}-----END [A-Z ]{0,40}PRIVATE KEY-----|.{0,20000})",
    re.DOTALL,
)
_USER_INFO = re.compile(r"://[^\s/@:'\"]{0,200}:(?P<PASSWORD>[^\s/@'\"]{1,400})@")
_CREDENTIALS = r"(?=[A-Za-z0-9+/=_\-.~]{0,4096}(?-i:[0-9A-Z=_\-]))(?P<NAME>[A-Za-z0-9+/=_\-.~]{6,4096})"
_HEADER = re.compile(
    r"(?i)\b(?:bearer\s{1,4}|authorization['\"]?\s{0,4}[:=]\s{0,4}['\"]?(?:token|bearer|basic)?\s{0,4})"
    r"(?!(?:token|bearer|basic)\b)" + _CREDENTIALS.replace("NAME", "AUTH_TOKEN")
)
_BASIC = re.compile(r"(?i)\bbasic\s{1,4}" + _CREDENTIALS.replace("NAME", "BASIC_AUTH"))
# `wandb login KEY`, and functions called `login`.
_LOGIN = re.compile(
    r"\b(?:wandb\s{1,4}login\s{1,4}(?:--\S{1,40}\s{1,4}(?:http\S{1,200}\s{1,4})?){0,4}|login\(\s{0,4}(?:\w{1,20}\s{0,4}=\s{0,4})?)"
    r"\\{0,3}['\"]?(?P<WANDB_API_KEY>[A-Za-z0-9_\-]{20,256})"
)
# Programs that accept a password in a one-letter option, or on standard input.
_ARGUMENT = re.compile(
    r"\bcurl\b[^|;&]{0,200}?\s(?:-[A-Za-z]{0,8}[uU]|--user|--proxy-user)[\s=]{0,4}['\"]?[^\s:'\"]{0,100}:(?P<CURL_PASSWORD>[^\s'\"]{1,400})"
    r"|\b(?:mysql|mysqldump|mysqladmin|mariadb)\b[^|;&]{0,200}?\s-p['\"]?(?P<DB_PASSWORD>[^\s'\"]{1,400})"
    r"|\b(?:sshpass|mongo(?:sh|dump)?|twine|(?:docker|podman|az|registry)\s{1,4}login)\b[^|;&]{0,200}?\s-p\s{0,4}['\"]?(?P<LOGIN_PASSWORD>[^\s'\"]{1,400})"
    r"|\bredis-cli\b[^|;&]{0,200}?\s-a\s{0,4}['\"]?(?P<REDIS_PASSWORD>[^\s'\"]{1,400})"
    r"|(?:\blogin|\bpasswd|--password-stdin|\bsudo\s{1,4}-S)\b[^|;&]{0,200}?<<<\s{0,4}['\"]?(?P<STDIN_PASSWORD>[^\s'\"]{4,400})"
    r"|\b(?:echo|printf)\s{1,4}(?:-n\s{1,4})?['\"]?(?P<PIPED_PASSWORD>[^\s'\"|;&]{4,400})['\"]?\s{0,4}\|[^|;&]{0,200}?(?:\blogin\b|--password-stdin\b|\bpasswd\b|\bsudo\s{1,4}-S\b)"
    r"|\bconfigure\s{1,4}set\s{1,4}\S{0,80}(?:secret|key|token)\S{0,20}\s{1,4}['\"]?(?P<AWS_PASSWORD>[^\s'\"]{1,400})"
    r"|\bmachine\s{1,4}\S{1,200}\s{1,4}login\s{1,4}\S{1,200}\s{1,4}password\s{1,4}(?P<NETRC_PASSWORD>[^\s'\"]{1,400})"
)
_TAKES_ARGUMENT = re.compile(
    r"curl|mysql|mariadb|sshpass|mongo|twine|redis-cli|login|<<<|sudo|configure\s|machine\s"
)
# A name that ends in one of these words, a separator, and its value: `NAME=x`, `"name": "x"`,
# `["name"] = "x"`, `--name x`, `name ........ x`. `_parts` looks up the beginnings of names, since a pattern
# for them could be tried from every character of a long word.
_NAMED = re.compile(
    r"(?P<word>(?i:passw(?:or)?d|passwd|passphrase|pwd|secret(?:[_\-]?(?:access)?[_\-]?key)?|token|api[_\-]?key"
    r"|access[_\-]?key(?:[_\-]?id)?|private[_\-]?key|auth[_\-]?key|wandb[_\-]?key|credentials?|signature)|_KEY)"
    r"(?P<between>\\{0,3}['\"]?\]?\s{0,4}(?::[-=]|[=:])\s{0,4}(?:['\"]?\$\{\w{1,64}:[-=]|[bru$](?=['\"]))?|\s{1,4}\.{3,200}\s{0,4}|['\"],?\s{1,4}|\s{1,4})"
    r"(?P<quote>\\{0,3}['\"])?(?P<value>(?(quote)[^'\"\n]{1,4096}|[^\s,;'\"&)}\]]{1,4096}))"
)
# Whole words only: TOKENIZERS_PARALLELISM is not a secret.
_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:_|$)", re.IGNORECASE
)
# Names, in lower case with `_` between words, whose values are secrets in any form.
_STRONG = re.compile(
    r"(?:^|_)(?:passw(?:or)?d|passwd|passphrase|\w+_pwd|(?:secret_)?access_?key(?:_id)?|secret_?key|private_key"
    r"|(?:api|auth|wandb|swanlab|hf|hugging_?face|openai|anthropic)_?(?:api_?)?key"
    r"|(?:api|auth|bearer|refresh|hf|hub|hugging_?face|github|gitlab|wandb|swanlab|openai|slack|bot)_?token)$"
)
# Names whose values are secrets only if they look like one: in `secret: my-kubernetes-secret` it is a name.
_WEAK = re.compile(r"(?:^|_)(?:secret|credentials?)$|^token$|(?:_token|_key)$")
_ONLY_RANDOM = re.compile(r"(?:_token|_key)$")
_TOKEN_LIKE = re.compile(r"(?=.*\d)[A-Za-z0-9+/=_\-.~:]{8,}$|[A-Za-z0-9+/=_\-.~:]{24,}$")
_RANDOM_RUN = re.compile(
    r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{12,}|(?=[a-z]*[A-Z])(?=[A-Z]*[a-z])[A-Za-z]{16,}"
)
_HEX_KEY = re.compile(r"[0-9a-f]{40}")
_RANDOM = re.compile(rf"(?<![\w@./+-]){_HEX_KEY.pattern}(?![\w-])")
_OF_REVISION = re.compile(
    r"(?i)(?:^|[^a-z])(?:rev|revision|commit|sha\d{0,3}|hash|digest|checksum|version|ref|tag|git\b[^;|&]{0,80})[^a-z]{0,3}$"
)
_NAME_REACH = 64  # maximum characters of a name before the word
# Not secrets: words for none, references to variables, command substitutions, numbers.
_PLAIN = re.compile(
    r"(?i)(none|null|true|false|\*+|\?|<\w+>|\$\{?\w+.{0,20}|(?:\$\(|`).*|\{env:|-?\d+(\.\d+)?(e[+-]?\d+)?%?)$"
)
# Not secrets in a job either: references of any kind, paths, URLs, names of variables, code.
_REFERENCE = re.compile(
    r"[$`{<\[(*%@!?\-\\].*|\+[a-z]*|(?:~|\.{0,2})/[\w.\-/]*|[A-Za-z][\w+.\-]*://.*"
    r"|.*\.(?:json|pem|key|txt|ya?ml|env|crt|pub|ini)"
    r"|(?:[A-Z][A-Z0-9]*_)+(?:TOKEN|KEY|SECRET|PASSWORD|ID)|[A-Za-z_]+(?:\.[A-Za-z_]+)+|[A-Za-z_][\w.]*[(\[].*|env:.*"
)
# Keys in examples and of servers without access control.
_PLACEHOLDER = re.compile(
    r"(?i)(?:none|null|nil|true|false|yes|no|on|off|auto|default|empty|dummy|fake|test|local|todo|tbd|unset|unused"
    r"|na|n/a|str\??|string|pass|token|key|secret|password"
    r"|(?:my|the|a|some|no|not|fake|dummy|test|example|sample)[_\- ][a-z_\- ]*"
    r"|(.)\1*|.*(?:x{4}|your|change[_\-]?me|replace|placeholder|redacted|example|abc[_\-]?123|\.\.\.|…|<\w|[_\-]here\b"
    r"|not[_\-](?:needed|used|required|set)|no[_\-](?:key|token|auth)).*|x{3,}|[a-z_\-]*(?:key|token|secret)[a-z_\-]*)"
)
_NAME_END = re.compile(r"[A-Za-z0-9_.\-]*$")
# Special tokens, counts of tokens, and keys of rows.
_VOCABULARY = re.compile(
    r"(?i)(^|[_.\-])(eos|bos|pad|unk|sep|cls|mask|image|video|audio|vision|next|new|start|end|stop|special|think"
    r"|prefix|suffix|decoder_start|eot|per|max|min|num|of|first|last|each|added|bad|tool|by|forced)[_\-]?$"
)
# Dataset columns: `--input_key question2024`.
_COLUMN = re.compile(
    r"(?:^|_)(?:input|output|prompt|messages|question|label|answer|response|chosen|rejected|system|reward(?:_\w+)?"
    r"|image|video|audio|tools?|metadata|id|index|sort|group|data_source)_keys?$"
)
_GENERIC = ("TOKEN", "KEY", "PASSWORD", "SECRET", "API_KEY", "AUTH_TOKEN")  # any other variable is preferred
_TOLD_BY_SHAPE = ("GITHUB_TOKEN", "GITLAB_TOKEN", "AWS_ACCESS_KEY_ID", "SLACK_TOKEN", "WEBHOOK_URL", "TOKEN")
_FLAG = re.compile(r"(--?[A-Za-z][\w.-]*|[+~]*[A-Za-z_][\w.@/-]*)=(.+)", re.DOTALL)
_CONTINUED = re.compile(r"\\\n\s*")  # a line continuation in a shell


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable of this name holds a secret."""
    return _VARIABLE.search(name) is not None


def secrets_in(text: str, *, before: str = "") -> tuple[Secret, ...]:
    """Return the secrets in a text, disjoint and in order; `before`: the preceding text, such as a name."""
    random = (
        Secret(*match.span(), "KEY", Grade.RANDOM)
        for match in _RANDOM.finditer(text)
        if _OF_REVISION.search(text[: match.start()] or before) is None
    )
    return _disjoint((*_parts(text), *random))


def secrets_of(name: str, value: str) -> tuple[Secret, ...]:
    """Return the secrets in the value of a variable, a setting or a flag, or the whole value as one."""
    if _is_named(name, value):
        return (Secret(0, len(value), variable_of(name), Grade.CERTAIN),)
    result = secrets_in(value, before=name)
    if name and len(result) == 1 and result[0].end - result[0].start == len(value):
        return (result[0]._replace(variable=variable_of(name)),)
    return result


def secrets_in_words(words: Sequence[str]) -> Iterator[tuple[int, str, Secret]]:
    """Yield each secret in a command's words: the word's index, its text as a shell reads it, the secret."""
    line, begin = "\n".join(words), 0
    arguments = tuple(_of_patterns((_ARGUMENT, _LOGIN), line)) if _TAKES_ARGUMENT.search(line) else ()
    for index, word in enumerate(words):
        before, flag = words[index - 1] if index else "", _FLAG.fullmatch(word)
        text = word
        if is_text(words, index):
            text = _CONTINUED.sub("", word)
            result = secrets_in(text)
        elif flag is not None:
            result = _moved(secrets_of(flag[1], flag[2]), flag.start(2))
        elif before.startswith("-") and "=" not in before:
            result = secrets_of(before, word)
        else:
            result = secrets_in(word)
        if text == word:
            own = (each for each in arguments if begin <= each.start and each.end <= begin + len(word))
            result = _disjoint((*result, *_moved(own, -begin)))
        yield from ((index, text, each) for each in result)
        begin += len(word) + 1


def is_text(words: Sequence[str], index: int) -> bool:
    """Return whether a word of a command is code for a shell or an interpreter."""
    return any(map(str.isspace, words[index])) or bool(index and re.fullmatch(r"-[a-z]*c", words[index - 1]))


def looks_random(text: str) -> bool:
    """Return whether a text contains a long run of mixed letters and digits or of mixed case, as keys do."""
    return _RANDOM_RUN.search(text) is not None


def variable_of(name: str) -> str:
    """Return the environment variable for a setting's name: WANDB_KEY for `trainer.wandb-key`."""
    own = re.sub(r"[^A-Za-z0-9]+", "_", name.rpartition(".")[2]).strip("_").upper()
    return f"_{own}" if not own or own[0].isdigit() else own


def masked(text: str) -> str:
    """Return a text with its passwords, keys and tokens replaced by `***`; takes linear time."""
    out, position = [], 0
    for each in sorted(_parts(text)):
        if each.end > position:
            out += [text[position : each.start], MASK] if each.start >= position else []
            position = each.end
    return "".join((*out, text[position:]))


def one_line(text: str, *, longest: int) -> str:
    """Return a text as one line of at most `longest` characters, without secrets and control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in masked(text)).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def without_secrets(line: Line) -> Line:
    """Return a line of a log with its secrets masked, safe to store and print."""
    return msgspec.structs.replace(line, text=masked(line.text))


def _moved(secrets: Iterable[Secret], by: int) -> tuple[Secret, ...]:
    return tuple(each._replace(start=each.start + by, end=each.end + by) for each in secrets)


def _disjoint(secrets: Iterable[Secret]) -> tuple[Secret, ...]:
    """Return the secrets that do not overlap, in order; certain, early and long ones take precedence."""
    out: list[Secret] = []
    for each in sorted(secrets, key=lambda s: (-s.grade, s.start, -s.end, s.variable in _GENERIC)):
        if all(each.end <= other.start or other.end <= each.start for other in out):
            out.append(each)
    return tuple(sorted(out))


def _parts(text: str) -> Iterator[Secret]:
    """Yield the parts of a text to mask in logs; they may overlap."""
    patterns = [_SHAPES, _HEADER, _BASIC]
    if "PRIVATE KEY" in text:
        patterns.append(_PRIVATE_KEY)
    if "://" in text:
        patterns.append(_USER_INFO)
    if "login" in text:
        patterns.append(_LOGIN)
    if _TAKES_ARGUMENT.search(text):
        patterns.append(_ARGUMENT)
    yield from _of_patterns(patterns, text)
    for match in _NAMED.finditer(text):
        begin = match.start("word")
        name_end = _NAME_END.search(text[max(0, begin - _NAME_REACH) : begin])
        name = name_end[0] if name_end else ""
        if _is_masked(name, match):
            # In a shell `NAME= x` sets NAME to nothing; the next word or line is another value.
            apart = (
                not name.startswith("--")
                and not match["quote"]
                and re.search(r"\n|^\S*=\s", match["between"])
            )
            certain = not apart and _is_named(name + match["word"], match["value"])
            grade = Grade.CERTAIN if certain else Grade.LIKELY
            yield Secret(*match.span("value"), variable_of(name + match["word"]), grade)


def _of_patterns(patterns: Iterable[re.Pattern[str]], text: str) -> Iterator[Secret]:
    for match in (match for pattern in patterns for match in pattern.finditer(text)):
        variable = str(match.lastgroup)
        certain = _is_shape(variable, match[variable])
        is_variable = match[variable].startswith("$")
        if certain or not (is_variable or variable.endswith("_PASSWORD")):  # a port, the name of a database
            yield Secret(*match.span(variable), variable, Grade.CERTAIN if certain else Grade.LIKELY)


def _is_shape(variable: str, value: str) -> bool:
    """Return whether the match of a pattern is a secret and not an example of one."""
    if _PLACEHOLDER.fullmatch(value):
        return False
    if variable in _TOLD_BY_SHAPE or value.startswith(("local-", "wandb_v")):
        return True
    if variable.endswith("_PASSWORD") or variable == "PASSWORD":
        return _is_plausible(value)
    if variable in ("AUTH_TOKEN", "WANDB_API_KEY"):
        return _is_plausible(value) and _TOKEN_LIKE.match(value) is not None
    return looks_random(value)


def _is_plausible(value: str) -> bool:
    """Return whether a value can be a secret: neither a word for none nor a reference nor an example."""
    return (
        len(value) >= 4  # characters; a shorter one occurs in any text
        and not _REFERENCE.fullmatch(value)
        and not _PLACEHOLDER.fullmatch(value)
        and not _PLAIN.match(value)
    )


def _is_named(name: str, value: str) -> bool:
    """Return whether a name makes its value certainly a secret."""
    own = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2])
    own = re.sub(r"_\d+$", "", re.sub(r"[^a-z0-9]+", "_", own.lower()).strip("_"))
    if "passw" in own and re.fullmatch(r"\d{4,}", value):
        return _STRONG.search(own) is not None
    if not _is_plausible(value):
        return False
    if _STRONG.search(own) or ("wandb" in own and _HEX_KEY.fullmatch(value)):
        return True
    if (
        _WEAK.search(own) is None
        or _COLUMN.search(own)
        or _VOCABULARY.search(re.sub(r"(token|key)$", "", own) or "?")
    ):
        return False
    like = looks_random if _ONLY_RANDOM.search(own) else _TOKEN_LIKE.match
    return bool(like(value))


def _is_masked(name: str, match: re.Match[str]) -> bool:
    """Return whether to mask the value of a match of _NAMED; `name`: the characters before its word."""
    word, between, value = match["word"], match["between"], match["value"]
    flag = name.startswith("--")
    upper = (name + word).isupper() and "_" in name + word
    assigned = "=" in between or ":" in between or "..." in between
    if not assigned and not flag and not (upper and "," in between and _TOKEN_LIKE.match(value)):
        return False
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
