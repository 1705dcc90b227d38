#!/bin/bash
# A job that Ray starts: arrays from another file, JSON of the environment, a pipe into a log.
pkill -9 sglang || true
set -ex
export PYTHONUNBUFFERED=1

LINKS=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)
if [ "$LINKS" -gt 0 ]; then HAS_LINKS=1; else HAS_LINKS=0; fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
ROTARY_BASE=500000 source "${HERE}/models/tiny.sh"

GPUS=${GPUS:-4}
ENGINES=${ENGINES:-$((GPUS / 2))}
CKPT_ARGS=(
    --hf-checkpoint /models/Qwen3-4B
    # --load /models/nowhere
    --save "/out/my run/$(basename "$HERE")"
)
EVAL_ARGS=()
PERF_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu=9216 --colocate)
[[ $GPUS == 4 && -z "${NO_EVAL:-}" ]] && EVAL_ARGS+=(--eval-prompt-data aime /data/aime.jsonl)

ENVIRONMENT=$(cat <<EOF
{"env_vars": {"PYTHONPATH": "/root/megatron", "NCCL_NVLS_ENABLE": "${HAS_LINKS}"}}
EOF
)
ray start --head --num-gpus "$GPUS"
ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json="$ENVIRONMENT" \
    -- python3 train.py \
    --actor-num-nodes 1 --actor-num-gpus-per-node "${GPUS}" \
    --rollout-num-gpus-per-engine "${ENGINES}" \
    --num-rollout 100 --rollout-batch-size 8 --n-samples-per-prompt 4 \
    --rollout-max-response-len 2048 --lr 1e-6 --kl-loss-coef 0.00 \
    --sglang-cuda-graph-bs 1 2 $(seq 4 4 16) \
    ${MODEL_ARGS[@]} \
    "${CKPT_ARGS[@]}" ${EVAL_ARGS[@]} "${PERF_ARGS[@]}" "$@" 2>&1 | tee "${HERE}/run.log"
