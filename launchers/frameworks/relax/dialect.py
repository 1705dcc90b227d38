"""How Relax differs from the other frameworks with its trainer and engine."""

from autotune.launchers.frameworks.megatron.dialect import Dialect

# The flags of Relax itself were read in its sources by hand.
# Flags of later commits (relax/utils/arguments.py).
_FURTHER = """
    ci-train-rollout-logprob-abs-diff-threshold custom-advantage-function-path
    custom-eval-rollout-log-function-path custom-update-weight-post-write-path disable-s3-model-cleanup
    dynamic-context-parallel enable-affinity fast-colocate-switching hybrid-dcs-weight-sync
    hybrid-weights-backuper-on-gpu load-forge-rollout-data opd-kl-coef opd-teacher-ckpt-step
    opd-teacher-load opd-type rollout-sample-hook-path sglang-config sglang-router-ip sglang-router-port
    sglang-router-request-timeout-secs sglang-server-concurrency tq-rdma-mode tq-storage-backend use-opd
"""
DIALECT = Dialect(
    name="relax",
    own="05149ae1",
    trainer="d98e8a64",
    names=frozenset(_FURTHER.split()),
    engine_version="0.5.9",
    graph_limit="sglang-cuda-graph-max-bs",
    expandable={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    inverse={"enable-weights-backuper": "disable-weights-backuper"},
    trainer_first=True,
)
