"""Names of the flags that slime, Relax and their SGLang know; any other is ignored without a word."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# slime/utils/arguments.py 0.3.1, which Relax began as a copy of
TRAINER = _names(
    """
actor-num-gpus-per-node actor-num-nodes advantage-estimator allgather-cp apply-chat-template
apply-chat-template-kwargs balance-data buffer-filter-path check-weight-update-equal ci-disable-kl-checker
ci-load-grad-norm ci-save-grad-norm ci-test ci-train-rollout-logprob-abs-diff-threshold colocate
custom-advantage-function-path custom-config-path custom-convert-samples-to-train-data-path
custom-eval-rollout-log-function-path custom-generate-function-path custom-loss-function-path
custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path
custom-megatron-init-path custom-model-provider-path custom-pg-loss-reducer-function-path
custom-reward-post-process-path custom-rm-path custom-rollout-log-function-path custom-tis-function-path
custom-update-weight-post-write-path data-pad-size-multiplier data-source-path debug-rollout-only
debug-train-only disable-compute-advantages-and-returns disable-grpo-std-normalization
disable-rewards-normalization disable-rollout-global-dataset disable-wandb-random-suffix dump-details
dynamic-sampling-filter-path enable-mtp-training entropy-coef eps-clip eps-clip-c eps-clip-high eval-config
eval-function-path eval-input-key eval-label-key eval-max-context-len eval-max-prompt-len
eval-max-response-len eval-min-new-tokens eval-prompt-data eval-reward-key eval-temperature eval-tool-key
eval-top-k eval-top-p fetch-trajectory-retry-times freeze-params-name-list gamma get-mismatch-metrics
group-rm hf-checkpoint http-proxy input-key keep-old-actor kl-coef kl-loss-coef kl-loss-type label-key lambd
load-debug-rollout-data load-forge-rollout-data log-correct-samples log-multi-turn log-passrate
log-probs-chunk-size log-probs-max-tokens-per-gpu log-reward-category loss-mask-type loss-type
mask-offpolicy-in-partial-rollout max-tokens-per-gpu memory-recorder memory-snapshot-dir
memory-snapshot-num-steps metadata-key min-batch-collection-ratio model-name multimodal-keys
n-samples-per-eval-prompt n-samples-per-prompt normalize-advantages num-critic-only-steps num-epoch
num-gpus-per-node num-rollout num-steps-per-rollout offload offload-optimizer-states offload-rollout
offload-train only-train-params-name-list opd-kl-coef opd-teacher-ckpt-step opd-teacher-load opd-type
opsm-delta over-sampling-batch-size partial-rollout prefill-num-servers profile-target prompt-data
recompute-loss-function ref-ckpt-step ref-load ref-update-interval reward-key rm-type rm-url
rollout-all-samples-process-path rollout-batch-size rollout-buffer-url rollout-data-postprocess-path
rollout-external-engine-addrs rollout-function-path rollout-health-check-first-wait
rollout-health-check-interval rollout-health-check-timeout rollout-max-context-len rollout-max-prompt-len
rollout-max-response-len rollout-num-gpus rollout-num-gpus-per-engine rollout-sample-filter-path
rollout-sample-hook-path rollout-seed rollout-shuffle rollout-skip-special-tokens rollout-stop
rollout-stop-token-ids rollout-task-type rollout-temperature rollout-top-k rollout-top-p
save-debug-rollout-data save-debug-train-data save-hf sglang-config sglang-router-ip sglang-router-port
sglang-router-request-timeout-secs sglang-server-concurrency skip-eval-before-train start-rollout-id
tb-experiment-name tb-project-name tis-clip tis-clip-low tool-key train-backend train-env-vars
update-weight-buffer-size update-weights-interval use-distributed-post use-dynamic-batch-size
use-fault-tolerance use-kl-loss use-opd use-opsm use-rollout-entropy use-rollout-logprobs
use-rollout-routing-replay use-routing-replay use-tensorboard use-tis use-unbiased-kl use-wandb value-clip
wandb-always-use-train-step wandb-dir wandb-group wandb-host wandb-key wandb-mode wandb-run-id wandb-team
"""
)

# slime alone
SLIME = _names(
    """
balance-by-flops freeze-indexer load-debug-rollout-data-subsample megatron-config-path
megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules megatron-deepgemm-moe-forward-layers
megatron-deepgemm-moe-forward-modules post-mlp-layernorm post-self-attn-layernorm qwen-gdn-backend
release-train reset-optimizer-states rollout-data-transport update-weight-delta-checksum
update-weight-delta-encoding update-weight-disk-dir update-weight-disk-keep-files
update-weight-local-checkpoint-dir update-weight-mode update-weight-transport use-gated-attention
use-stateless-adam
"""
)

# relax/utils/arguments.py, Relax alone
RELAX = _names(
    """
agent-command agent-cwd agent-env agent-timeout agentic-eval-prepare-pool-size agentic-prepare-pool-size
agentic-reasoning-parser agentic-tool-call-parser audio-sample-rate autoscaler-config
checkpoint-engine-backend conversation-key-map critic-load critic-lr critic-lr-warmup-iters
critic-num-gpus-per-node critic-num-nodes critic-save critic-train-only custom-dataset-class
custom-dataset-class-path custom-prompt-path defer-reward-to-post-process disable-rollout-trim-samples
disable-s3-model-cleanup disable-weights-backuper dynamic-context-parallel enable-affinity
enable-cuda-memory-check eval-size fast-colocate-switching frame-factor freeze-audio-model
freeze-audio-projection freeze-language-model freeze-vision-model freeze-vision-projection fully-async
genrm-engine-config genrm-model-path genrm-num-gpus genrm-num-gpus-per-engine genrm-sampling-config hybrid
hybrid-dcs-weight-sync hybrid-weights-backuper-on-gpu image-max-token-num image-min-token-num
image-resize-scale-factor load-debug-rollout-data-subsample max-actor-ckpt-to-keep max-global-restart
max-staleness megatron-to-hf-mode mm-processor-pool-size normalize-bbox notify-urls num-data-storage-units
num-iters-per-train-update only-load-weight optimize-routing-replay partial-rollout-max-aborted-count
per-rank-fetch polling-mode prefetch-chunk-size prefetch-max-cached prefetch-num-workers profile-with-flops
profile-with-memory profile-with-stack qkv-format recompute-loss-function-use-reentrant ref-actor-config
reset-optimizer-states resource reward-max-concurrency reward-num-workers rlsp-server-port rm-type-fallback
rollout-engine-init-timeout rollout-external rollout-health-check-max-consecutive-failures
rollout-result-dir rotate-ckpt sapo-tau-neg sapo-tau-pos scale-in-drain-timeout scale-in-shutdown-timeout
scale-out-partial-success-policy scale-out-timeout sft-chunked-logits sft-logits-chunk-size
sft-max-in-flight-steps sft-oversize-custom-function-path sft-oversize-strategy sft-predict-interval
sft-prefetch-buffer-size sft-prefetch-chunk-size sft-prefetch-num-workers sft-tq-timeout-minutes
skip-hf-validate slime-router-health-check-failure-threshold slime-router-max-connections
slime-router-middleware-paths slime-router-sticky slime-router-sticky-idle-secs slime-router-timeout
streaming-buffer-size system-prompt timeline-dump-dir tq-rdma-mode tq-storage-backend
train-memory-margin-bytes true-on-policy-mode use-agentic-rollout use-audio-in-video use-clearml
use-dynamic-global-batch-size use-health-check use-metrics-service use-slime-router use-streaming-dataset
video-fps video-fps-max-frames video-fps-min-frames video-max-token-num video-min-token-num
vision-dp-when-tp warm-hf-checkpoint-page-cache
"""
)

# ServerArgs of SGLang 0.5.9 and 0.5.15.post1, behind --sglang-
SGLANG = _names(
    """
abort-on-priority-when-disabled admin-api-key allow-auto-truncate api-key attention-backend
attention-context-parallel-size attn-cp-size base-gpu-id bucket-e2e-request-latency
bucket-inter-token-latency bucket-time-to-first-token chat-template
checkpoint-engine-wait-weights-before-ready chunked-prefill-size collect-tokens-histogram
completion-template config constrained-json-disable-any-whitespace constrained-json-whitespace-pattern
context-length cpu-offload-gb crash-dump-folder cuda-graph-bs cuda-graph-max-bs custom-sigquit-handler
custom-weight-loader data-parallel-size debug-tensor-dump-input-file debug-tensor-dump-layers
debug-tensor-dump-output-folder decode-attention-backend decode-log-interval decrypted-config-file
decrypted-draft-config-file deepep-config deepep-mode delete-ckpt-after-loading device
disable-chunked-prefix-cache disable-cuda-graph disable-cuda-graph-padding disable-custom-all-reduce
disable-fast-image-processor disable-flashinfer-autotune disable-flashinfer-cutlass-moe-fp4-allgather
disable-hybrid-swa-memory disable-outlines-disk-cache disable-overlap-schedule disable-radix-cache
disable-shared-experts-fusion disable-tokenizer-batch-decode disaggregation-bootstrap-port
disaggregation-decode-enable-offload-kvcache disaggregation-decode-polling-interval disaggregation-ib-device
disaggregation-mode disaggregation-transfer-backend dist-init-addr dist-timeout dllm-algorithm
dllm-algorithm-config download-dir dp-size dtype dynamic-batch-tokenizer-batch-size
dynamic-batch-tokenizer-batch-timeout elastic-ep-backend enable-attn-tp-input-scattered
enable-broadcast-mm-inputs-process enable-cache-report enable-cudagraph-gc enable-custom-logit-processor
enable-deterministic-inference enable-dp-attention enable-dp-lm-head enable-draft-weights-cpu-backup
enable-dynamic-batch-tokenizer enable-dynamic-chunking enable-eplb enable-expert-distribution-metrics
enable-flashinfer-allreduce-fusion enable-fp32-lm-head enable-fused-qk-norm-rope enable-hierarchical-cache
enable-layerwise-nvtx-marker enable-lmcache enable-lora enable-lora-overlap-loading enable-memory-saver
enable-metrics enable-metrics-for-all-schedulers enable-mixed-chunk enable-mscclpp enable-multi-layer-eagle
enable-multimodal enable-nccl-nvls enable-nsa-prefill-context-parallel enable-p2p-check enable-pdmux
enable-precise-embedding-interpolation enable-prefill-delayer enable-prefix-mm-cache
enable-priority-scheduling enable-profile-cuda-graph enable-request-time-stats-logging
enable-return-hidden-states enable-return-routed-experts enable-single-batch-overlap enable-symm-mem
enable-tokenizer-batch-encode enable-torch-compile enable-torch-compile-debug-mode enable-torch-symm-mem
enable-trace enable-two-batch-overlap enable-weights-cpu-backup encoder-only encoder-transfer-backend
encoder-urls ep ep-dispatch-algorithm ep-num-redundant-experts ep-size eplb-algorithm
eplb-min-rebalancing-utilization-threshold eplb-rebalance-layers-per-chunk eplb-rebalance-num-iterations
expert-distribution-recorder-buffer-size expert-distribution-recorder-mode expert-parallel-size
export-metrics-to-file export-metrics-to-file-dir extra-metric-labels fastapi-root-path file-storage-path
flashinfer-mla-disable-ragged flashinfer-mxfp4-moe-precision forward-hooks fp4-gemm-runner-backend
fp8-gemm-runner-backend gc-warning-threshold-secs generation-tokens-buckets gpu-id-step grammar-backend
grpc-mode hf-chat-template-name hicache-io-backend hicache-mem-layout hicache-ratio hicache-size
hicache-storage-backend hicache-storage-backend-extra-config hicache-storage-prefetch-policy
hicache-write-policy hierarchical-sparse-attention-extra-config host init-expert-location is-embedding
json-model-override-args keep-mm-feature-on-device kt-cpuinfer kt-max-deferred-experts-per-token kt-method
kt-num-gpu-experts kt-threadpool-count kt-weight-path kv-cache-dtype kv-events-config language-only
limit-mm-data-per-request load-balance-method load-format log-level log-level-http log-requests
log-requests-format log-requests-level log-requests-target lora-backend lora-eviction-policy lora-paths
lora-target-modules mamba-backend mamba-full-memory-ratio mamba-scheduler-strategy mamba-ssm-dtype
mamba-track-interval max-loaded-loras max-lora-chunk-size max-lora-rank max-loras-per-batch
max-mamba-cache-size max-prefill-tokens max-queued-requests max-running-requests max-total-tokens
mem-fraction-static mm-attention-backend mm-enable-dp-encoder mm-process-config model model-checksum
model-impl model-loader-extra-config model-path modelopt-checkpoint-restore-path
modelopt-checkpoint-save-path modelopt-export-path modelopt-quant moe-a2a-backend moe-data-parallel-size
moe-dense-tp-size moe-dp-size moe-runner-backend mooncake-ib-device nccl-init-addr nccl-port nnodes
node-rank nsa-decode-backend nsa-prefill-backend nsa-prefill-cp-mode num-continuous-decode-steps
num-reserved-decode-tokens numa-node offload-group-size offload-mode offload-num-in-group
offload-prefetch-step otlp-traces-endpoint page-size pdmux-config-path piecewise-cuda-graph-compiler
piecewise-cuda-graph-max-tokens piecewise-cuda-graph-tokens pipeline-parallel-size port pp-async-batch-depth
pp-max-micro-batch-size pp-size preferred-sampling-params prefill-attention-backend
prefill-delayer-forward-passes-buckets prefill-delayer-max-delay-passes
prefill-delayer-token-usage-low-watermark prefill-delayer-wait-seconds-buckets prefill-max-requests
prefill-round-robin-balance priority-scheduling-preemption-threshold prompt-tokens-buckets quantization
quantization-param-path quantize-and-serve radix-eviction-policy random-seed reasoning-parser
remote-instance-weight-loader-backend remote-instance-weight-loader-seed-instance-ip
remote-instance-weight-loader-seed-instance-service-port
remote-instance-weight-loader-send-weights-group-ports
remote-instance-weight-loader-start-seed-via-transfer-engine revision rl-on-policy-target rl-quant-profile
sampling-backend sampling-defaults schedule-conservativeness schedule-low-priority-values-first
schedule-policy scheduler-recv-interval served-model-name show-time-cost skip-server-warmup
skip-tokenizer-init sleep-on-idle sm-group-num soft-watchdog-timeout speculative-accept-threshold-acc
speculative-accept-threshold-single speculative-algorithm speculative-attention-mode
speculative-draft-attention-backend speculative-draft-load-format speculative-draft-model
speculative-draft-model-path speculative-draft-model-quantization speculative-draft-model-revision
speculative-eagle-topk speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-capacity
speculative-ngram-match-type speculative-ngram-max-bfs-breadth speculative-ngram-min-bfs-breadth
speculative-num-draft-tokens speculative-num-steps speculative-token-map stream-interval stream-output
swa-full-tokens-ratio tbo-token-distribution-threshold tensor-parallel-size
tokenizer-metrics-allowed-custom-labels tokenizer-metrics-custom-labels-header tokenizer-mode tokenizer-path
tokenizer-worker-num tool-call-parser tool-server torch-compile-max-bs torchao-config tp-size
triton-attention-num-kv-splits triton-attention-reduce-in-fp32 triton-attention-split-tile-size
trust-remote-code uvicorn-access-log-exclude-prefixes warmups watchdog-timeout weight-loader-disable-mmap
weight-version
"""
)

# 0.5.9 alone
SGLANG_0_5_9 = _names(
    """
debug-tensor-dump-inject disable-hicache-numa-detect disaggregation-decode-dp disaggregation-decode-tp
disaggregation-prefill-pp ds-channel-config-path ds-heavy-channel-num ds-heavy-channel-type
ds-heavy-token-num ds-sparse-decode-threshold enable-double-sparsity enable-nan-detection
enable-piecewise-cuda-graph fp4-gemm-backend fp8-gemm-backend hybrid-kvcache-ratio mm-max-concurrent-calls
mm-per-request-timeout multi-item-scoring-delimiter speculative-ngram-branch-length
speculative-ngram-max-match-window-size speculative-ngram-min-match-window-size
"""
)

# 0.5.15.post1 alone
SGLANG_0_5_15 = _names(
    """
asr-max-buffer-seconds asr-max-concurrent-sessions batch-notify-size bf16-gemm-backend cp-strategy
cuda-graph-backend-decode cuda-graph-backend-prefill cuda-graph-bs-decode cuda-graph-bs-prefill
cuda-graph-config cuda-graph-max-bs-decode cuda-graph-max-bs-prefill cuda-graph-tc-compiler dcp-size
debug-cuda-graph decode-context-parallel-size decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints
decoupled-spec-rank decoupled-spec-role deepep-dispatcher-output-dtype default-priority-value
detokenizer-worker-num disable-attn-tp-gather disable-decode-cuda-graph disable-piecewise-cuda-graph
disable-prefill-cuda-graph disable-priority-preemption disaggregation-decode-enable-radix-cache
disaggregation-decode-extra-slots dsa-decode-backend dsa-paged-mqa-logits-backend dsa-prefill-backend
dsa-prefill-cp-mode dsa-topk-backend elastic-ep-rejoin enable-adaptive-dispatch-to-encoder
enable-aiter-allreduce-fusion enable-breakable-cuda-graph enable-deepep-waterfill
enable-deepseek-v4-fp4-indexer enable-dp-attention-local-control-broadcast
enable-dsa-prefill-context-parallel enable-elastic-expert-backup enable-forward-pass-metrics
enable-fused-moe-sum-all-reduce enable-hisparse enable-http2 enable-int8-mamba-checkpoint
enable-linear-replayssm enable-mamba-cache-stochastic-rounding enable-mfu-metrics enable-mis
enable-mm-global-cache enable-page-major-kv-layout enable-prefill-context-parallel enable-prefill-cp
enable-quant-communications enable-return-indexer-topk enable-session-radix-cache enable-ssl-refresh
enable-streaming-session enable-strict-thinking enable-tf32-matmul enable-unified-memory
encoder-bootstrap-port encoder-register-urls enforce-disable-flashinfer-allreduce-fusion
enforce-piecewise-cuda-graph enforce-shared-experts-fusion engine-info-bootstrap-port
experts-shared-outer-loras flashinfer-allreduce-fusion-backend forward-pass-metrics-ipc-name
forward-pass-metrics-worker-id gc-threshold grpc-http-sidecar-port hisparse-config
incremental-streaming-output int8-mamba-ckpt-size kv-canary kv-canary-real-data kv-canary-sweep-interval
linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend linear-replayssm-cache-len
lmcache-config-file load-snapshot-publish-interval lora-drain-wait-threshold lora-strict-loading
lora-use-virtual-experts mamba-cache-philox-rounds mamba-radix-cache-strategy min-free-slots-delay
model-config-parser modelexpress-config msprobe-dump-config optimistic-prefill-retries pre-warm-nccl
prefill-cp-mode prefill-delayer-max-delay-ms prefill-delayer-queue-min-ratio prefill-only-disable-kv-cache
radix-cache-backend spec-trace-dir speculative-adaptive speculative-adaptive-config
speculative-dflash-block-size speculative-dflash-draft-window-size speculative-draft-window-size
speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path
speculative-ngram-external-sam-budget speculative-ngram-max-trie-depth speculative-skip-dp-mlp-sync
speculative-use-rejection-sampling ssl-ca-certs ssl-certfile ssl-keyfile ssl-keyfile-password stat-loggers
stream-response-default-include-usage strip-thinking-cache tokenizer-backend trace-modules use-ray
uses-mamba-radix-cache weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints
weight-loader-prefetch-num-threads
"""
)
