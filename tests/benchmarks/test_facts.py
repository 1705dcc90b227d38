"""Reading the settings of a release from its source: dataclasses without importing them, and what changed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from benchmarks.facts import engines, megatron, ms_swift, nemo_rl, tags, trl
from benchmarks.facts.__main__ import SUBJECTS, differences, knobs_of
from benchmarks.facts.dataclass_fields import Field, dataclasses_in, fields_of, read
from benchmarks.facts.pins import pinned, required, versions
from benchmarks.facts.sources import Commit

_SOURCE = """
from dataclasses import dataclass, field
from typing import ClassVar, Optional
raise SystemExit("never run")

@dataclass
class Optimizer:
    lr: float = 1e-6

@dataclass
class Base:
    size: int = 4
    name: Optional[str] = None
    _hidden: int = 0
    shared: ClassVar[int] = 1

@dataclass(frozen=True)
class Actor(Base):
    size: int = 8
    share: float | None = 0.5
    optim: Optimizer = field(default_factory=Optimizer)
    words: list[str] = field(default_factory=list)
    limit: str | float | None = 2.0
    mixed: Optional[dict[str, Any]] = None

class NotOne:
    other: int = 1
"""


def test_fields_come_with_types_and_defaults_and_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(_SOURCE)
    (tmp_path / "broken.py").write_text("def (:\n")
    result = dataclasses_in(tmp_path)
    assert set(result) == {"Optimizer", "Base", "Actor"}
    assert result["Actor"] == {
        "size": Field("int", 8, ""),
        "name": Field("str?", None, ""),
        "share": Field("float?", 0.5, ""),
        "optim": Field("", None, "Optimizer"),
        "words": Field("", None, ""),
        "limit": Field("any", 2.0, ""),
        "mixed": Field("any", None, ""),
    }


def test_a_new_release_is_listed_by_setting() -> None:
    old = {"both": {"a": 1, "b": 2}, "dp": {}, "megatron": {"m": None}}
    new = {"both": {"a": 1, "b": 3, "c": "x"}, "dp": {}, "megatron": {}}
    assert differences(old, new, {}) == ["+ both c = 'x'", "! both b: 2 -> 3", "- megatron m"]
    assert differences(old, old, {}) == []


def test_what_changed_behind_a_knob_comes_first_and_names_it() -> None:
    old = {"flags": {"a": {"type": "int"}, "b": {}}}
    new = {"flags": {"a": {"type": "float"}, "c": {}}}
    assert differences(old, new, {"a": "concurrency"}) == [
        "! flags a: {'type': 'int'} -> {'type': 'float'} (concurrency)",
        "- flags b",
        "+ flags c = {}",
    ]


@pytest.mark.parametrize(
    ("subject", "setting", "knob"),
    [
        ("trl", "vllm_gpu_memory_utilization", "memory_fraction"),
        ("openrlhf", "train.micro_batch_size", "microbatch_size"),
        ("sglang", "mem_fraction_static", "memory_fraction"),
        ("vllm", "enforce_eager", "cuda_graphs"),
    ],
)
def test_the_knob_of_a_setting_is_that_of_its_row(subject: str, setting: str, knob: str) -> None:
    assert knobs_of(subject)[setting] == knob and "" not in knobs_of(subject)


_ENGINE = """
from dataclasses import dataclass, field
from typing import Annotated, Optional
from elsewhere import Mode
LIMIT = 2 * 1024
METHOD = Kind.FAST.value

class Kind(str, Enum):
    FAST = "fast"

class CacheConfig:
    share: float = Field(default=0.92, gt=0)
    _own: int = 1

@dataclass
class Args:
    share: float = CacheConfig.share
    again: float = get_field(CacheConfig, "share")
    kind: Kind = Kind.FAST
    method: str = METHOD
    limit: int = LIMIT
    large: int = 2**32
    noted: Annotated[Optional[int], "with a note"] = None
    other: Mode = Mode.DEFAULT

@dataclass
class Server(Args):
    _version: str = "v1"
"""


def test_defaults_are_followed_to_where_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "args.py").write_text(_ENGINE)
    result = fields_of("Server", read(tmp_path))
    assert result == {
        "share": Field("float", 0.92, ""),
        "again": Field("float", 0.92, ""),
        "kind": Field("", "fast", "Kind"),
        "method": Field("str", "fast", ""),
        "limit": Field("int", 2048, ""),
        "large": Field("int", 1 << 32, ""),
        "noted": Field("int?", None, ""),
        "other": Field("", None, ""),
    }
    assert dataclasses_in(tmp_path, private=True)["Server"]["_version"] == Field("str", "v1", "")
    assert dataclasses_in(tmp_path)["Server"]["kind"].section == ""  # an enumeration is a value


def test_the_engines_of_a_release_are_read_from_a_wheel_or_a_source_tree(tmp_path: Path) -> None:
    folder = tmp_path / "areal-1.0.4.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Name: areal\nRequires-Dist: torch>=2\nRequires-Dist: sglang[tracing]==0.5.10.post1 ; extra == 'x'\n"
    )
    assert pinned(tmp_path) == {"sglang": "0.5.10.post1"}
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[project]\nname = "areal"\ndependencies = ["ray"]\n[project.optional-dependencies]\n'
        'vllm = ["vllm==0.17.0; sys_platform == \'linux\'"]\nall = ["areal[vllm]"]\n'
    )
    assert pinned(source) == {"vllm": "0.17.0"}


def test_a_type_that_changed_or_came_without_a_default_is_displayed() -> None:
    old = {"defaults": {"a": 1}, "types": {"a": "int", "b": "any"}}
    new = {"defaults": {"a": 1, "d": 2}, "types": {"a": "float", "c": "any", "d": "int"}}
    assert differences(old, new, {}) == ["+ defaults d = 2", "- b", "+ c: any", "! type of a: int -> float"]


_TRL = {
    "transformers/training_args.py": """
default_optim = "adamw_torch"
@dataclass
class TrainingArguments:
    output_dir: str | None = field(default=None)
    logging_steps: float = field(default=500)
    optim: OptimizerNames | str = field(default=default_optim)
    use_cpu: bool = field(default=False)
    _n_gpu: int = field(init=False, default=-1)
""",
    "trl/trainer/base_config.py": """
@dataclass
class _BaseConfig(TrainingArguments):
    logging_steps: float = field(default=10)
""",
    "trl/trainer/grpo_config.py": """
@dataclass
class GRPOConfig(_BaseConfig):
    num_generations: int | None = field(default=8)
""",
    "trl/trainer/model_config.py": "@dataclass\nclass ModelConfig:\n    lora_r: int = 16\n",
    "trl/scripts/utils.py": """
@dataclass
class DatasetMixtureConfig:
    streaming: bool = False
@dataclass
class ScriptArguments:
    dataset_name: str | None = None
""",
    "trl/scripts/grpo.py": """
@dataclass
class GRPOScriptArguments(ScriptArguments):
    reward_funcs: list[str] | None = field(default=None)
""",
    "accelerate/commands/launch.py": """
parser.add_argument("-h", "--help", action="help")
parser.add_argument("--use_cpu", action="store_true")
parser.add_argument("-m", "--module", action="store_true")
parser.add_argument("--num_processes", type=int, default=None)
parser.add_argument("--gradient-clipping", type=float)
parser.add_argument("--fsdp_version", type=str, choices=["1", "2"])
parser.add_argument("--env", action="append")
""",
}


def test_what_trl_takes_is_read_in_three_packages(tmp_path: Path) -> None:
    for name, text in _TRL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("trl-1.16.0", "transformers-5.23.0", "accelerate-1.15.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    assert trl.facts(tmp_path) == {
        "source": "TRL 1.16.0 with transformers 5.23.0 and accelerate 1.15.0",
        "types": {
            "accelerate_config": "launch",
            "dataset_name": "str?",
            "fsdp_version": "launch",
            "gradient_clipping": "launch float",
            "logging_steps": "float",
            "lora_r": "int",
            "module": "launch switch",
            "num_generations": "int?",
            "num_processes": "launch int",
            "optim": "any",
            "output_dir": "str?",
            "reward_funcs": "any",
            "streaming": "bool",
            "use_cpu": "bool",  # the training's, which both know
        },
        "defaults": {
            "logging_steps": 10,
            "lora_r": 16,
            "num_generations": 8,
            "optim": "adamw_torch_fused",
            "streaming": False,
            "use_cpu": False,
        },
    }


def test_the_packages_below_a_release_are_those_that_it_always_needs(tmp_path: Path) -> None:
    folder = tmp_path / "ms_swift-4.6.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Name: ms-swift\nRequires-Dist: transformers<5.20,>=4.33\n"
        "Requires-Dist: accelerate\nRequires-Dist: vllm>=0.5; extra == 'all'\n"
    )
    assert required(tmp_path) == {"transformers": "transformers<5.20,>=4.33", "accelerate": "accelerate"}
    assert versions(tmp_path) == {"ms_swift": "4.6.0"}


def test_the_wheels_of_ms_swift_are_read_where_its_settings_stand() -> None:
    wanted = (
        "swift/arguments/base_args/base_args.py",
        "swift/rlhf_trainers/args_mixin.py",
        "transformers/training_args_seq2seq.py",
    )
    assert all(re.fullmatch(ms_swift.FILES, name) for name in wanted)
    assert not re.fullmatch(ms_swift.FILES, "swift/megatron/arguments.py")


_SERVER_ARGS = """
class ServerArgs:
    model_path: A[str, Arg(help="the model", aliases=["--model"])]
    context_length: A[Optional[int], Arg(help="length", type_parser=human_readable_int)] = None
    tp_size: int = 1
    cuda_graph_max_bs: A[Optional[int], Arg(no_cli=True)] = None
    own: A[bool, Arg(no_cli=True)] = False

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1)
        parser.add_argument("--cuda-graph-max-bs", type=int)
        parser.add_argument("--graph-max-bs", action=OldName, dest="cuda_graph_max_bs")
        parser.add_argument("--own-on", action=StoreConstAction, dest="own")
        parser.add_argument("--stream-output", action="store_true")
"""


def test_options_of_sglangs_command_line_beside_its_fields_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "sglang" / "srt"
    folder.mkdir(parents=True)
    (folder / "server_args.py").write_text(_SERVER_ARGS)
    assert engines.sglang(tmp_path) == {
        "by_card": [],
        "types": {
            "context_length": "count?",
            "cuda_graph_max_bs": "int?",
            "model_path": "str",
            "own": "bool",
            "tp_size": "int",
        },
        "defaults": {"own": False, "tp_size": 1},
        "command_line": {
            "graph_max_bs": "any",
            "model": "str",
            "own_on": "any",
            "stream_output": "bool",
            "tensor_parallel_size": "int",
        },
        "internal": ["own"],
        "aliases": {
            "graph_max_bs": "cuda_graph_max_bs",
            "model": "model_path",
            "tensor_parallel_size": "tp_size",
        },
    }


def test_the_type_of_a_default_that_is_null_is_what_all_annotations_of_its_name_say(tmp_path: Path) -> None:
    (tmp_path / nemo_rl.FILE).parent.mkdir(parents=True)
    (tmp_path / nemo_rl.FILE).write_text("policy: {chunk: null, plan: null, many: null, size: 4}\n")
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "policy.py").write_text(
        "class A(TypedDict):\n    chunk: NotRequired[int | None]\n    plan: str\n    many: list[int] | None\n"
        "class B(TypedDict):\n    chunk: int\n    plan: int | None\n"
    )
    assert nemo_rl.facts(tmp_path, "c0ffee")["types"] == {
        "policy.chunk": "int?",
        "policy.many": "any",
        "policy.plan": "any",
        "policy.size": "float",
    }


def test_what_sglang_chooses_by_its_card_is_read_of_the_branches_of_its_source() -> None:
    source = (
        "def handle_gpu_memory_settings(self, gpu_mem):\n"
        "    if gpu_mem is not None:\n"
        "        if gpu_mem < 20 * 1024:\n"
        "            self.chunked_prefill_size = 2048\n"
        "            decode.max_bs = 8\n"
        "        elif is_npu() and gpu_mem < 32 * 1024:\n"
        "            self.chunked_prefill_size = 1\n"
        "        else:\n"
        "            declare(self, chunked_prefill_size=4096)\n"
        "            if self.tp_size < 4:\n"
        "                decode.max_bs = 24\n"
        "            else:\n"
        "                decode.max_bs = 80\n"
        "    else:\n"
        "        self.chunked_prefill_size = 4096\n"
        "        decode.max_bs = 160\n"
    )
    assert engines.by_card(["x = 1", source]) == [
        [1, 4096, 160, 160],
        [20480, 2048, 8, 8],
        [None, 4096, 24, 80],
    ]


def test_flags_of_megatron_are_those_of_its_parser_and_of_the_configurations_that_it_adds(
    tmp_path: Path,
) -> None:
    files = {
        "megatron/training/arguments.py": (
            "def _add_size_args(parser):\n"
            "    exclude = ['timers']\n"
            "    ArgumentGroupFactory(TransformerConfig, exclude=exclude).build_group(parser)\n"
            "    parser.add_argument('--kv-channels', type=int)\n"
        ),
        "megatron/core/base.py": (
            "@dataclass\nclass ParallelConfig:\n    timers: int = 0\n    fp16: bool = False\n"
        ),
        "megatron/core/config.py": (
            "@dataclass\nclass TransformerConfig(ParallelConfig):\n"
            "    num_layers: int | None = None\n"
            "    bias: bool = field(default=True, metadata={'argparse_meta': {'arg_names': ['--no-bias']}})\n"
            "    gc_eval: bool = True\n"
            "    modules: Optional[List[str]] = None\n"
            "    dtype: Literal['bf16', 'fp16'] = 'bf16'\n"
        ),
        "megatron/core/other.py": "@dataclass\nclass UnusedConfig:\n    unused: int = 0\n",
    }
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    assert megatron.flags("megatron", Commit(tmp_path, "HEAD")) == {
        "kv-channels": {"type": "int"},
        "num-layers": {"type": "int"},
        "fp16": {"action": "store_true"},
        "no-bias": {"action": "store_true"},
        "no-gc-eval": {"action": "store_true"},
        "disable-gc-eval": {"action": "store_true"},
        "modules": {"action": "store(nargs=+)"},
        "dtype": {"choices": ["bf16", "fp16"]},
    }


def test_a_tag_of_a_repository_that_is_no_release_of_pypi_is_newer_than_the_facts(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert tags.newest_tag(str(tmp_path)) is None
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    for name in ("v1.0.4", "skyrl-v2.0.0", "v3.0.0rc1", "nightly", "backup/0818"):
        subprocess.run([*git, "tag", name], check=True)
    assert tags.newest_tag(str(tmp_path)) == Version("2.0.0")


def test_every_subject_has_a_repository_and_a_release_that_is_known() -> None:
    assert SUBJECTS.keys() <= tags.REPOSITORIES.keys()
    for subject in tags.REPOSITORIES:
        assert tags.newest_known(subject).release
    assert tags.newest_known("verl") >= Version("0.9.1")
