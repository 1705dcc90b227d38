"""Infers phase and component from the frames, methods and prefixes around a message."""

from __future__ import annotations

import functools
import re

import msgspec

from autotune.policies.diagnosis.rules.branches import literals_of
from autotune.policies.diagnosis.software.components import COMPONENTS
from autotune.policies.diagnosis.software.phases import ENGINES, PHASES
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.failure import Component, Phase

# Lines that engines print while starting; weaker evidence than frames.
STAGE = re.compile(
    r"Capturing cuda ?graphs?|Capture (target|cuda|CUDA|prefill)|Loading safetensors|Load weight (begin|end)|"
    r"Memory pool end|KV Cache is allocated|# GPU blocks"
)
STAGE_LITERALS = literals_of(STAGE.pattern)  # every match of STAGE contains one of them
_FRAME = re.compile(
    r"File \"[^\"\n]+\", line \d+|File \"?[^\"\s]+\"?(, line |:)\d+|^\S*\.py:\d+:? in |\S+\.py:\d+ \w+|"
    r"\.py\(\d+\): \w+|"
    r"\.py in \w+\(|ray::\w"
)
_FRAME_LITERALS = ("File ", ".py", "ray::")  # every frame contains one of them
# Frames of rich, of torch's own tracebacks, of faulthandler and Ray, of profilers, of IPython.
_OTHER_FRAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\W*(?P<path>[^\s\"']+\.py):(?P<number>\d+):? in (?P<function>\w+)",
        r"File \"(?P<path>[^\"]+)\", line (?P<number>\d+) in (?P<function>\w+)",
        r"^\W*(?P<path>[^\s\"']+\.py)\((?P<number>\d+)\): (?P<function>\w+)",
        r"^\W*(?P<path>[^\s\"']+\.py):(?P<number>\d+) (?P<function>\w+)$",
        r"^File \"?(?P<path>[^\s\"':]+\.py):(?P<number>\d+), in (?:\w+\.)?(?P<function>\w+)",
    )
)
_ERROR_END = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b(?!\()(?:: .*)?$")


# An engine runs no training micro-batches, and builds only the models that it serves.
_ENGINES_OWN = {Phase.INIT: Phase.ROLLOUT_INIT, Phase.FORWARD: Phase.ROLLOUT}
_OWNERS = {
    Phase.ROLLOUT_INIT: Component.ROLLOUT,
    Phase.INIT: Component.TRAINER,
    Phase.FORWARD: Component.TRAINER,
    Phase.LOG_PROB: Component.TRAINER,
    Phase.BACKWARD: Component.TRAINER,
    Phase.OPTIMIZER: Component.TRAINER,
    Phase.CHECKPOINT: Component.TRAINER,
    Phase.DATA: Component.DATA,
}
_ENGINE_FRAME = re.compile(rf"(?:^|[/\\\"]){ENGINES}/\S+, line \d+")
# Frames in which a trainer computes log-probs or an entropy from logits; engines sample in other frames.
_SCORE_FRAME = re.compile(
    r"torch/nn/functional\.py\S*, line \d+, in (?:log_)?softmax\b|"
    r"\bin (?:logsumexp\w*|\w*entropy_from_logits\w*|log_?probs?_from_logits\w*)$"
)
_SAMPLER_FRAME = re.compile(rf"{ENGINES}/\S+, line \d+|generation/utils\.py|\bin _?generate(?:_samples)?\b")
_VALIDATES = re.compile(r"\b_?validate\b|\bevaluation_loop\b|\beval_rollout")
# Innermost frames that allocate pinned host memory; a driver's message without figures does not say so.
_PINS = re.compile(
    r"\bpin_memory\b|_allocate_(?:cpu|host|pinned)\w*|cudaHost(?:Alloc|Register)|cudaMallocHost|pinned_(?:memory|buffer|tensor)"
)

_RAY_CALL = re.compile(r"\bray::\w+(?:\[[^\]]{0,60}\])?\.\w+\(")
_RELAYS = re.compile(
    r"ray::(?:\w*(?:TaskRunner|Driver|Pipeline|Orchestrator|Main|Coordinator)\w*)\.|"
    r"\.(?:execute\w*|_?call\w*|__\w+__|run|apply|invoke|fit|dispatch\w*|get\w*|sync_func|remote\w*)\("
)
# An engine builds its layers and loads their weights, before it has a pool or captures graphs.
_LOADS = re.compile(
    r"\bin (?:load_model|_?load_weights?|create_weights|_?initialize_model|\w*weight_loader|"
    r"process_weights_after_loading|get_model|_?create_weight\w*|\w*weights_iterator)\b|"
    r"^load_tensors: |\b[Ee]rror (?:when )?loading model\b"  # llama.cpp, engines in Rust
)
# An engine runs its largest batch once, to measure the memory that remains for the pool.
_PROFILES = re.compile(
    r"\bin (?:_?profile_run|determine_(?:available_memory|num_available_blocks)|profile_max_num_token)\b"
)
_SAMPLES = re.compile(r"\b_dummy_(?:sampler|pooler)_run\b")
# A sleeping engine maps its memory again: the allocators of vLLM, also for Ascend, and of torch_memory_saver.
_WAKES = re.compile(
    r"\bin create_and_map\b|device_allocator/c[au]mem\.py\S*, line \d+, in wake_up\b|"
    r"torch_memory_saver\S*, line \d+, in _?resume\b"
)
# A trainer creates, loads or gathers the state of its optimizer.
_STATES = re.compile(
    r"\bin (?:initialize_optimizer_states|_?init_group|_?configure_(?:zero|basic)_optimizer|"
    r"_?create_fp32_partitions|_setup_for_real_optimizer|\w*load_optim\w*)\b|"
    r"optim\w*\.load_state_dict\(|\boptim(?:izer)?_state(?:_dict)?\b|"
    r"torch/optim/\S+, line \d+, in load_state_dict|"
    r"megatron/core/optimizer/\S+, line \d+, in (?:__init__|get_\w*optimizer\w*|load_\w+)"
)
# Programs that make images and videos, by their own frames or a convolution's: no language model has any.
_MAKES_IMAGES = re.compile(
    r"[/\\\"](?:invokeai|comfy|ComfyUI|stable-diffusion-webui)[/\\]|torch/nn/modules/conv\.py"
)
_TRAINS = re.compile(r"\btrain|[Tt]rainer|backward|optim")
_SHARED = re.compile(
    r"shared_memory\.py|shm_broadcast\.py|SharedMemory\(|_share_(?:fd|filename)_|SemLock|"
    r"multiprocess\w*/(?:synchronize|heap)\.py"
)


def phase_of(context: str) -> Phase:
    """Return the phase that a context of frames and methods shows; NONE if it shows none."""
    ranked = min(map(_phase_rank, context.split("\n")))
    return PHASES[ranked][0] if ranked < len(PHASES) else Phase.NONE


def as_frame(line: str) -> str:
    """Return a frame of any tool in Python's own format; any other line unchanged."""
    for pattern in _OTHER_FRAMES:
        if (match := pattern.search(line)) is not None:
            path, number, function = match["path"], match["number"], match["function"]
            return f'  File "{path}", line {number}, in {function}{line[match.end() :]}'
    return line


@functools.lru_cache(1024)  # consecutive messages share most of their context
def _phase_rank(line: str) -> int:
    line = as_frame(line)
    matches = (at for at, (_, pattern) in enumerate(PHASES) if pattern.search(line))
    return next(matches, len(PHASES))


def from_worker(context: list[str]) -> list[str]:
    """Return a context from the innermost worker method that Ray's errors name; all of it if there is none.

    Methods of a driver, which relays a worker's error, and general ones (`execute`, `run`) do not count.
    """
    for at in range(len(context) - 1, -1, -1):
        call = _RAY_CALL.search(context[at])
        if call is not None and not _RELAYS.search(call[0]):
            return context[at:]
    return context


def calls_worker(context: list[str]) -> bool:
    """Return whether a context begins with a worker's method, as one from `from_worker` may."""
    return bool(context) and _RAY_CALL.search(context[0]) is not None and not _RELAYS.search(context[0])


def phase_around(context: list[str], line: str) -> Phase:
    """Return the phase of a message: of its whole traceback, or of the nearest line that shows one."""
    if any(is_frame(text) for text in context):
        phase = phase_of("\n".join([*context, line]))
        return Phase.LOG_PROB if phase is Phase.ROLLOUT and _scores(context) else phase
    result = (phase_of(text) for text in (line, *reversed(context)))
    return next((phase for phase in result if phase is not Phase.NONE), Phase.NONE)


def _scores(context: list[str]) -> bool:
    """Return whether a rollout failed while computing log-probs, which some releases do inside it."""
    return any(_SCORE_FRAME.search(as_frame(line)) for line in _innermost(context)) and not any(
        _SAMPLER_FRAME.search(as_frame(line)) for line in context
    )


def finer(phase: Phase, context: str) -> Phase:
    """Return the phase refined by frames after the message: a training method has several phases."""
    result = phase_of(context)
    if phase is Phase.NONE:
        return result
    return result if phase is Phase.FORWARD and result in (Phase.BACKWARD, Phase.OPTIMIZER) else phase


def implied(phase: Phase, component: Component) -> Component:
    """Return the component that a phase implies if it is unknown; a worker may be trainer and engine."""
    if phase is Phase.ROLLOUT_INIT and component is Component.TRAINER:
        return Component.ROLLOUT
    if phase is Phase.LOG_PROB and component is Component.ROLLOUT:
        return Component.TRAINER
    return _OWNERS.get(phase, component) if component is Component.UNKNOWN else component


def role(phase: Phase, component: Component) -> Phase:
    """Return the phase adapted to its component: reference models only compute log-probs, engines start."""
    if component is Component.ROLLOUT and phase in _ENGINES_OWN:
        return _ENGINES_OWN[phase]
    scores = component in (Component.REF, Component.REWARD)
    return Phase.LOG_PROB if scores and phase is Phase.FORWARD else phase


def serves(context: list[str]) -> bool:
    """Return whether one of the innermost frames of a traceback is an inference engine's."""
    return any(_ENGINE_FRAME.search(line) for line in _innermost(context))


def in_validation(facts: Facts, phase: Phase, context: list[str]) -> Facts:
    """Return the facts, with `validation` set if the context shows a rollout of a validation."""
    if phase is Phase.ROLLOUT and any(_VALIDATES.search(text) for text in context):
        return msgspec.structs.replace(facts, validation=True)
    return facts


def pins_host_memory(context: list[str]) -> bool:
    """Return whether the innermost frame of a traceback allocates pinned host memory."""
    innermost = _innermost(context)
    return any(_PINS.search(line) for line in innermost) and not any("set_device" in x for x in innermost)


def loads_weights(context: list[str]) -> bool:
    """Return whether a starting engine was loading its weights."""
    return any(_LOADS.search(as_frame(line)) for line in context)


def profiles_batch(context: list[str]) -> bool:
    """Return whether a starting engine was running its largest batch to measure its memory."""
    return any(_PROFILES.search(as_frame(line)) for line in context)


def samples_batch(context: list[str]) -> bool:
    """Return whether a starting engine was sampling, or pooling, for its largest number of requests."""
    return any(_SAMPLES.search(as_frame(line)) for line in context)


def wakes_engine(context: list[str]) -> bool:
    """Return whether a sleeping engine was taking back its own memory."""
    return any(_WAKES.search(as_frame(line)) for line in context)


def makes_images(context: list[str]) -> bool:
    """Return whether a traceback is of a program that makes images or videos and trains nothing."""
    return any(_MAKES_IMAGES.search(line) for line in context) and not any(map(_TRAINS.search, context))


def makes_states(context: list[str]) -> bool:
    """Return whether a trainer was creating, loading or gathering the state of its optimizer."""
    return any(_STATES.search(as_frame(line)) for line in context)


def asks_shared_memory(context: list[str]) -> bool:
    """Return whether the innermost frame of a traceback allocates shared memory: the disk is /dev/shm."""
    return any(_SHARED.search(line) for line in _innermost(context))


def _innermost(context: list[str]) -> list[str]:
    """Return the last two frames or code lines of a context: a frame with its code, or two frames."""
    return [line for line in context if is_frame(line) or line.startswith("    ")][-2:]


def component_of(context: str) -> Component:
    """Return the component that a context of prefixes and frames shows; UNKNOWN if it shows none."""
    ranked = min(map(_component_rank, context.split("\n")))
    return COMPONENTS[ranked][0] if ranked < len(COMPONENTS) else Component.UNKNOWN


def _component_rank(line: str) -> int:
    line = as_frame(line)
    matches = (at for at, (_, pattern) in enumerate(COMPONENTS) if pattern.search(line))
    return next(matches, len(COMPONENTS))


def is_stage(line: str) -> bool:
    """Return whether a line is one that engines print while starting."""
    return STAGE.search(line) is not None


def is_frame(line: str) -> bool:
    """Return whether a line is a frame of a traceback."""
    return any(literal in line for literal in _FRAME_LITERALS) and _FRAME.search(line) is not None


def ends_error(line: str) -> bool:
    """Return whether a line ends a traceback, so that lines above it belong to another error."""
    return _ERROR_END.match(line) is not None
