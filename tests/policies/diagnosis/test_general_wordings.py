"""Programs that no table knows: what their lines say that they begin, and how their methods are called."""

from __future__ import annotations

import pytest

from autotune.policies.diagnosis.phase_patterns import phase_of
from autotune.policies.diagnosis.software.general_wordings import bar_stage, general_stage
from autotune.policies.values.failure import Component, Phase


@pytest.mark.parametrize(
    ("line", "phase", "component"),
    [
        ("Pushing weights for policy version 12", Phase.WEIGHT_SYNC, Component.TRAINER),
        ("[loop] Step 4: starting weight sync", Phase.WEIGHT_SYNC, Component.TRAINER),
        ("restoring trainer state from /ckpt/7", Phase.CHECKPOINT, Component.TRAINER),
        ("Dumping full checkpoint to s3://bucket/run", Phase.CHECKPOINT, Component.TRAINER),
        ("recomputing the old log probs", Phase.LOG_PROB, Component.TRAINER),
        ("Caching reference logprobs", Phase.LOG_PROB, Component.TRAINER),
        ("running optimizer step", Phase.OPTIMIZER, Component.TRAINER),
        ("entering backward", Phase.BACKWARD, Component.TRAINER),
        ("Starting forward and backward pass (batch_size=8)", Phase.FORWARD, Component.TRAINER),
        ("Launching 4 rollout engines", Phase.ROLLOUT_INIT, Component.DRIVER),
        ("collecting 256 trajectories", Phase.ROLLOUT, Component.DRIVER),
        ("Packing the training examples", Phase.DATA, Component.DATA),
        ("sharding the policy over 8 ranks", Phase.INIT, Component.TRAINER),
        ("Computing reference logprobs:  31%|###", Phase.LOG_PROB, Component.TRAINER),
    ],
)
def test_a_line_says_what_is_begun(line, phase, component):
    assert general_stage(line) == (phase, component)


@pytest.mark.parametrize(
    "line",
    [
        "timing/weight_sync: 0.31",
        "weight_sync_interval=4",
        "Weight sync complete (0.8s)",
        "Finished loading the checkpoint",
        "broadcasting the weights took 3.1",
        "collecting trajectories: 100%|###| 8/8",
        '  File "/app/weight_sync.py", line 3, in run',
        "skipping the optimizer step",
        "the model is large",
        "Saving checkpoint " + "x" * 400,
    ],
)
def test_other_lines_say_nothing(line):
    assert general_stage(line) is None


@pytest.mark.parametrize(
    ("name", "phase", "component"),
    [
        ("Compute ref log probs", Phase.LOG_PROB, Component.TRAINER),
        ("Train dataset reference log probs", Phase.LOG_PROB, Component.TRAINER),
        ("Compute values", Phase.LOG_PROB, Component.TRAINER),
        ("Update policy", Phase.FORWARD, Component.TRAINER),
        ("Train mini-batches", Phase.FORWARD, Component.TRAINER),
        ("Update weight buckets", Phase.WEIGHT_SYNC, Component.TRAINER),
        ("Writing model shards", Phase.CHECKPOINT, Component.TRAINER),
        ("Generate sequences", Phase.ROLLOUT, Component.DRIVER),
        ("Rollout generation", Phase.ROLLOUT, Component.DRIVER),
        ("Applying chat template to train dataset", Phase.DATA, Component.DATA),
        ("Dropping Long Sequences (num_proc=8)", Phase.DATA, Component.DATA),
        ("Saving the dataset (0/1 shards)", Phase.DATA, Component.DATA),
    ],
)
def test_a_bar_that_is_not_full_says_what_goes_on(name, phase, component):
    assert bar_stage(f"{name}:  46%|####6     | 12/26 [00:56<01:05,  4.69s/it]") == (phase, component)
    assert bar_stage(f"{name}: 100%|##########| 26/26 [02:01<00:00,  4.69s/it]") is None
    assert bar_stage(f"{name}: 12 of 26") is None


@pytest.mark.parametrize("name", ["Training Progress", "Evaluating the dataset", "Episode [1/16]", "Loading"])
def test_other_bars_say_nothing(name):
    assert bar_stage(f"{name}:   4%|4         | 1/26 [00:04<01:05,  4.69s/it]") is None


@pytest.mark.parametrize(
    ("method", "phase"),
    [
        ("push_params_to_engine", Phase.WEIGHT_SYNC),
        ("actor_params_generator", Phase.WEIGHT_SYNC),
        ("load_other_checkpoint", Phase.CHECKPOINT),
        ("fused_mlp_backward", Phase.BACKWARD),
        ("score_ref_logps", Phase.LOG_PROB),
        ("llama_attn_forward", Phase.FORWARD),
        ("chunked_logprobs", Phase.FORWARD),
        ("build_policy", Phase.INIT),
        ("run_multi_turn_rollout", Phase.ROLLOUT),
        ("collate_batch", Phase.DATA),
        ("patch_forward_hook", Phase.NONE),
    ],
)
def test_a_method_is_called_by_what_it_does(method, phase):
    assert phase_of(f'  File "/app/own/program.py", line 31, in {method}') is phase


def test_an_optimizer_of_ones_own_steps():
    assert phase_of('  File "/app/own/stateless_adam.py", line 9, in step') is Phase.OPTIMIZER
