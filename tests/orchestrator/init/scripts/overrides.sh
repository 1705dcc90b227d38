#!/usr/bin/env bash
# Hydra overrides behind nohup: defaults, functions, case, quotes of every kind, what a machine would have to tell.
set -euo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
STAMP=$(date +%Y%m%d)
NAME="$(echo "${MODEL##*/}" | tr '[:upper:]' '[:lower:]')-grpo"
prompt=512; response=$((1024 * 2))

tokens() {
    local factor=${1:-2}
    echo $(((prompt + response) * factor))
}

while [[ $# -gt 0 ]]; do
    case "$1" in
        --tp) TP=$2; shift 2 ;;
        *) break ;;
    esac
done

case "$DEVICE" in
    gpu | cuda) offload=False ;;
    npu) offload=True ;;
    *) echo "unknown $DEVICE" >&2; exit 1 ;;
esac

EXTRA=()
if [ -n "${OFFLOAD:-}" ] || [ "$offload" = True ]; then
    EXTRA+=(actor_rollout_ref.actor.fsdp_config.param_offload=True)
else
    EXTRA+=("+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True")
fi

export VLLM_USE_V1=1 TOKENIZERS_PARALLELISM=true
HYDRA_FULL_ERROR=1 nohup python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['/data/gsm8k/train.parquet', '/data/math/train.parquet']" \
    data.val_files=/data/gsm8k/test.parquet \
    data.train_batch_size=256 \
    data.max_prompt_length=$prompt \
    data.max_response_length=${response} \
    data.truncation='error' \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(tokens 4) \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${TP:-2} \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.60 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='my project' \
    trainer.experiment_name="${NAME}-${STAMP}" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    "${EXTRA[@]}" "$@" > "logs/${NAME}.log" 2>&1 &
