"""The real `verl.trainer.main_ppo`, started by `autotune launch` on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.contracts.environments import environment
from tests.e2e.test_driver import Head

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# A model without weights and a few rows: verl reads both before it asks for cards.
_PREPARE = """
import json, pathlib, sys
import pyarrow, pyarrow.parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
root = pathlib.Path(sys.argv[1])
model = root / "model"
words = {"[UNK]": 0, "[EOS]": 1, "[PAD]": 2, **{str(n): n + 3 for n in range(20)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="[EOS]", pad_token="[PAD]", unk_token="[UNK]"
)
fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
fast.save_pretrained(model)
(model / "config.json").write_text(json.dumps({
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "vocab_size": 512,
}))
rows = [{
    "data_source": "sums", "prompt": [{"role": "user", "content": "1 2 3"}], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "6"}, "extra_info": {"index": n},
} for n in range(16)]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "rows.parquet")
"""


def test_verl_without_a_gpu_is_the_machines_fault(tmp_path: Path) -> None:
    python = environment("verl")
    subprocess.run([str(python), "-c", _PREPARE, str(tmp_path)], check=True, timeout=120)
    rows = str(tmp_path / "rows.parquet")
    job = {
        "name": "real",
        "framework": "verl",
        "python": str(python),  # its own: autotune's interpreter has no verl
        "cluster": {"address": "local"},
        "settings": {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.path": str(tmp_path / "model"),
            "data.train_files": rows,
            "data.val_files": rows,
            "data.train_batch_size": 4,
            "data.max_prompt_length": 64,
            "data.max_response_length": 16,
            "data.dataloader_num_workers": 0,
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 256,
            "actor_rollout_ref.rollout.name": "vllm",
            "actor_rollout_ref.rollout.n": 2,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
            "actor_rollout_ref.rollout.max_model_len": 80,
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": 1,
            "trainer.total_training_steps": 2,
            "trainer.val_before_train": False,
            "trainer.logger": ["console"],
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        },
        "recovery": {"infrastructure_retries": 0},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    head = Head(tmp_path, 0, 0)
    done = head.autotune("launch", "job.yaml")
    assert done.returncode == 3, done.stderr
    assert "Total available GPUs 0 is less than total desired GPUs 1" in done.stderr
    assert "autotune resume" in done.stderr
    (diagnosed,) = [event for event in head.events() if event["type"] == "diagnosed"]
    assert diagnosed["cause"] == "infrastructure"
    assert json.dumps(diagnosed["evidence"]).count("gpu-unavailable") >= 1
