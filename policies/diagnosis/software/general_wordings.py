"""Phases of unknown programs, from general words in their lines, progress bars and method names."""

from __future__ import annotations

import re

from autotune.policies.diagnosis.software.patterns import Pattern
from autotune.policies.values.failure import Component, Phase

_IN = r", line \d+, in (?!\w*(?:patch|prepare|enable|disable|register|hook|config))"
_OF_WEIGHTS = r"(?:weights?|params?|parameters?)"
# Methods of programs that the tables do not know; the rows of PHASES for known programs precede them.
GENERAL_FRAMES: tuple[tuple[Phase, str], ...] = (
    (
        Phase.WEIGHT_SYNC,
        (
            rf"{_IN}\w*(?:sync|push|pull|broadcast|transfer|update|send|receive|recv|"
            rf"publish)\w*{_OF_WEIGHTS}\w*$|"
            rf"{_IN}\w*{_OF_WEIGHTS}_(?:sync|transfer|update|broadcast|generator|publish)\w*$"
        ),
    ),
    (
        Phase.CHECKPOINT,
        (
            rf"{_IN}\w*(?:save|load|restore|export|write)\w*(?:checkpoint|ckpt|snapshot)\w*$|"
            r"\w*saver\.py\S*, line \d+, in \w*(?:save|state_dict)\w*$"
        ),
    ),
    (Phase.OPTIMIZER, r"\w*(?:adam|sgd|muon|lion|optim)\w*\.py\S*, line \d+, in \w*step\w*$"),
    (Phase.BACKWARD, rf"{_IN}\w*backward\w*$"),
    (Phase.LOG_PROB, rf"{_IN}\w*(?:ref|old|teacher)\w*_log_?p\w*$|{_IN}\w*(?:compute|forward)\w*_values?$"),
    (Phase.FORWARD, rf"{_IN}\w*(?:forward|log_?probs?|logps?)\w*$"),
    (
        Phase.INIT,
        (
            rf"{_IN}\w*(?:load|build|create|init|setup|materialize)\w*_(?:model|policy|actor|critic|"
            rf"optimizer)s?\w*$|"
            rf"{_IN}\w*model_provider$"
        ),
    ),
    (Phase.ROLLOUT, rf"{_IN}\w*(?:rollout|trajector|generate_)\w*$"),
    (Phase.DATA, rf"{_IN}\w*(?:collate|tokenize|load_dataset|build_dataset)\w*$"),
)
_SOME = r"(?:[ _-]+[\w'\"()#./+,-]+){0,4}?[ _-]+"  # words between a verb and its noun
_SYNC = r"(?:start|begin|trigger|push|send|transfer|broadcast|sync|updat|publish|gather|stream|copy)\w*"
_NAMED_SYNC = (
    r"(?:weights?|param(?:eter)?s?|model)[ _-](?:sync\w*|transfer\w*|broadcast\w*|refit\w*|updat(?:e|ing)\b)"
)
_TABLE: tuple[tuple[Component, Phase, str], ...] = (
    (
        Component.TRAINER,
        Phase.CHECKPOINT,
        (
            r"(?:sav|writ|dump|export|persist|load|restor|resum|read|recover)\w*ing\b"
            rf"{_SOME}(?:checkpoint|ckpt|(?:optimizer|training|trainer)[ _-]state|snapshot)s?\b"
        ),
    ),
    (
        Component.TRAINER,
        Phase.WEIGHT_SYNC,
        rf"{_SYNC}\b{_SOME}(?:weights|parameters|params)\b|{_NAMED_SYNC}",
    ),
    (
        Component.TRAINER,
        Phase.LOG_PROB,
        (
            rf"(?:re)?(?:comput|calculat|cach|scor)\w*ing\b{_SOME}(?:log[ _-]?prob\w*|log_?ps?\b|"
            rf"old[ _]values\b)|"
            r"(?:ref(?:erence)?|teacher|reward|critic)(?: model)? (?:forward|inference|scoring)\b"
        ),
    ),
    (
        Component.TRAINER,
        Phase.OPTIMIZER,
        r"(?:optimi[sz]er|optim)[ _](?:step|update)\b|appl(?:y|ying) gradients\b|clip\w* grad\w*",
    ),
    (
        Component.TRAINER,
        Phase.BACKWARD,
        r"(?:start|begin|run|enter|before)\w*(?: the)? backward\b",
    ),
    (
        Component.TRAINER,
        Phase.FORWARD,
        (
            r"(?:start|begin|run|enter|before)\w*(?: the)? (?:forward|fwd)\b|fwd-bwd pass|"
            rf"(?:start|begin|run)\w*ing\b{_SOME}(?:training step|train step|mini-?batch|policy update|"
            rf"actor update)\b"
        ),
    ),
    (
        Component.DRIVER,
        Phase.ROLLOUT_INIT,
        (
            rf"(?:start|launch|initiali[sz]|creat|boot)\w*ing\b{_SOME}"
            r"(?:(?:inference|generation|rollout|serving)[ _-](?:engine|server|worker)s?|vllm|sglang)\b"
        ),
    ),
    (
        Component.DRIVER,
        Phase.ROLLOUT,
        (
            rf"(?:start|begin|run|collect|generat|sampl)\w*ing\b{_SOME}"
            r"(?:rollouts?|trajector\w+|responses|completions|episodes|generation)\b"
        ),
    ),
    (
        Component.DATA,
        Phase.DATA,
        (
            rf"(?:tokeniz|filter|preprocess|pack|shuffl|mapp|build|prepar)\w*ing\b{_SOME}"
            r"(?:datasets?|prompts|examples|corpus)\b"
        ),
    ),
    (
        Component.TRAINER,
        Phase.INIT,
        (
            rf"(?:initiali[sz]|build|creat|construct|instantiat|materiali[sz]|shard|wrapp|load)\w*ing\b{_SOME}"
            r"(?:models?|policy|actor|critic|teacher|optimi[sz]er|pretrained weights)\b"
        ),
    ),
)
# Names of progress bars, with any form of the verb: a bar that is not full shows the current activity.
_BARS: tuple[tuple[Component, Phase, str], ...] = (
    (
        Component.TRAINER,
        Phase.LOG_PROB,
        r"\w*log[ _-]?prob\w*|\w*log_?ps?\b|(?:comput|calculat)\w* (?:\w+ ){0,2}values\b",
    ),
    (
        Component.DATA,
        Phase.DATA,
        r"(?<!evaluating )(?<!evaluating the )(?:[\w-]+[ _-])?dataset\b|num_proc=\d",
    ),
    (Component.TRAINER, Phase.CHECKPOINT, rf"(?:sav|writ|dump|export)\w*{_SOME}(?:checkpoint\w*|shards?)\b"),
    (Component.TRAINER, Phase.WEIGHT_SYNC, rf"{_SYNC}\b{_SOME}weight[ _-]?(?:bucket|chunk|shard)s?\b"),
    (
        Component.TRAINER,
        Phase.FORWARD,
        (
            r"(?:updat|train)\w*[ _-](?:the[ _-])?(?:policy|actor|critic|(?:mini|micro)[ _-]?batch\w*)\b|"
            r"(?:policy|actor|critic)[ _-]updates?\b"
        ),
    ),
    (
        Component.DRIVER,
        Phase.ROLLOUT,
        (
            rf"(?:generat|sampl|collect)\w*{_SOME}(?:sequences?|responses?|completions?|rollouts?|episodes?|"
            r"trajector\w+)\b|rollout[ _-](?:generation|collection|phase)\b"
        ),
    ),
)
_COMPILED, _COMPILED_BARS = (
    tuple(
        (component, phase, Pattern(rf"\b(?:{pattern})", re.IGNORECASE)) for component, phase, pattern in table
    )
    for table in (_TABLE, _BARS)
)
_BAR = re.compile(r"([^|%]{2,160}): +\d{1,2}%\|")
_OVER = re.compile(
    r"\b(?:done|complete[ds]?|finish\w*|succe\w+|took|elapsed|ready|skip\w*|no |not |fail\w*|will|"
    r"every|each|after|if)\b|\bcost\b|\bin [\d.]+ ?m?s",
    re.IGNORECASE,
)
_LONGEST = 300  # characters: a longer line is no announcement of a phase
_KEY = re.compile(r"\w*['\"]?\s?[:=]\s{0,2}(?!\s*\d+%\|)\S")  # the words are the name of a metric or setting


def bar_stage(line: str) -> tuple[Phase, Component] | None:
    """Return phase and component of a progress bar; None if it is full, has no name or an unknown one."""
    bar = _BAR.match(line)
    if bar is None:
        return None
    named = ((phase, component) for component, phase, pattern in _COMPILED_BARS if pattern.search(bar[1]))
    return next(named, None)


def counting(line: str) -> bool:
    """Return whether a line is a named progress bar that is not full, so that its activity continues."""
    return _BAR.match(line) is not None


def general_stage(line: str) -> tuple[Phase, Component] | None:
    """Return phase and component of a line that announces an activity; None for any other line."""
    if len(line) > _LONGEST or 'File "' in line or "100%|" in line or _OVER.search(line):
        return None
    for component, phase, pattern in _COMPILED:
        if (match := pattern.search(line)) is not None and _KEY.match(line, match.end()) is None:
            return phase, component
    return None
