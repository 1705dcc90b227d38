"""The phases that programs announce in lines of their logs, for failures without frames."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from autotune.policies.diagnosis.software.general_wordings import bar_stage, counting, general_stage
from autotune.policies.diagnosis.software.patterns import Pattern
from autotune.policies.values.failure import Component, Phase


class Stage(NamedTuple):
    """The stage of a process according to one of its lines."""

    phase: Phase  # NONE: the process runs, and the line does not show its phase
    component: Component
    running: bool = False  # the line is a progress bar that is not full: the phase has not ended


_TABLE: tuple[tuple[Component, Phase, str], ...] = (
    # ---- inference engines: a line about serving ends the start-up
    (
        Component.ROLLOUT,
        Phase.WEIGHT_SYNC,
        (
            r"[Uu]pdate (?:engine )?weights? (?:online|from)|\bupdate weight: |"
            r"resum(?:e|ing)[_ ]memory[_ ]occupation|"
            r"areal_\w*(?:update_weight|weights_update)|\bstart (?:lora )?update (?:lora )?weights|"
            r"Receiving weights from|"
            r"[Uu]pdating inference weights|Reloading (?:checkpoint-format )?weights|"
            r"release_memory_occupation|"
            r"Start update_weights|Starting IPC weight update|Sleep mode freed|Fetching weights for v|"
            r"\"POST /(?:\w*update_\w*(?:param|weight)|\w*weights?_update|init_communicator|batch_update)|"
            r"\b[Ww]ak(?:e|ing) up\b|\"POST /(?:update_weights|resume_memory|release_memory|init_weights|"
            r"wake_up|sleep)"
        ),
    ),
    (
        Component.ROLLOUT,
        Phase.ROLLOUT,
        (
            # vLLM and SGLang
            r"(?:Decode|Prefill) batch\b|Application startup complete|Uvicorn running on|fired up and ready|"
            r"(?:prompt|generation|gen) throughput|Added request |Processed prompts: |Received request |"
            r"(?:Adding requests|Rendering prompts): +\d+%\||"
            r"Dumping (?:input data|scheduler)|SchedulerStats\(|"
            r"Running: \d+ reqs|\"(?:POST|GET) /\S* HTTP/1|Engine background task|"
            # TensorRT-LLM, TurboMind, llama.cpp, text-generation-inference
            r"\biter = \d+, .*num_scheduled_requests|[Ee]ncountered an error in forward|"
            r"\[TM\]\[\w+\] \[Forward\]|"
            r"^\[Forward\] |^(?:slot|srv) +(?:update_slots|launch_slot|log_server_r|process_token|release)|"
            r"server is listening on http|llama_decode: failed"
        ),
    ),
    (
        Component.ROLLOUT,
        Phase.ROLLOUT_INIT,
        (
            # vLLM
            r"Starting to load model|Initializing an? (?:\w+ )?LLM engine|Loading weights took|"
            r"Model loading took|Loading model weights took|Memory profiling takes|Available KV cache memory|"
            r"GPU KV cache size|# (?:GPU|npu|CPU|cuda|hpu) blocks|Maximum concurrency for|"
            r"Capturing (?:CUDA|cuda|ACL|HPU|XPU) ?graphs?|Graph capturing finished|"
            r"(?:Dynamo bytecode|torch\.compile takes|[Cc]ompiling a graph)|Loading (?:safetensors|"
            r"pt) checkpoint|"
            r"(?:EngineCore|WorkerProc) failed to start|init engine \(profile|torch_compile_cache|"
            r"Loading drafter model|[Ll]oading (?!checkpoint)\w[\w -]{0,30}shards: +\d+%|"
            r"Encoder cache will be initialized|"
            r"Creating LMCacheEngine|Auto-fitting max_model_len|warming up model|"
            # SGLang
            r"Init torch distributed (?:begin|ends)|Load weight (?:begin|end)|KV Cache is allocated|"
            r"Memory pool end|Capture (?:\w+ ){0,4}graph (?:begin|end|bs)|"
            r"Post-capture KV sizing|hierarchical KV host pool|GB host memory for |"
            r"Compile and warming up model|Warming up (?:FlashInfer|sampler|pooler)|Capturing model for|"
            r"Loading model from scratch|Multi-thread loading|Allocating \d+ CPU tensors|"
            r"max_total_num_tokens=|"
            r"Mamba Cache is allocated|FlashInfer autotune|[Aa]utotun\w+ (?:warmup|process)|"
            r"Loading from presharded|Loading weights from remote|"
            r"host memory for hierarchical KV cache|DeepGEMM warmup|JIT Pre-Compile|Capturing batches|"
            r"Loading Multi-thread|"
            # TensorRT-LLM and TensorRT
            r"Engine version [\d.]+ found|Loaded engine size|MemUsageChange|TRTGptModel (?:max|m[A-Z]|num)|"
            r"Number of (?:blocks|tokens) (?:in|per) (?:KV )?(?:cache|block)|Max KV cache (?:blocks|pages)|"
            r"GB for (?:model weights|max tokens)|when calculating max tokens|"
            r"Memory used after loading|Creating KV cache|\bRequested amount of GPU memory|"
            r"Executor (?:model )?(?:creation|initialization)|[Ww]arming up (?:model|autotuner)|"
            # TurboMind, llama.cpp
            r"Convert to turbomind format: |"
            r"\[BlockManager\]|\[SequenceManager\]|\[LlamaWeight|gemm_config\.in is not found|"
            r"NCCL group_id = |"
            r"\bload_tensors: |\bllama_\w+: |\bllm_load_\w+: |\bggml_(?:backend|gallocr|vulkan)\w*: |"
            r"alloc_tensor_range|"
            r"graph_reserve|common_init_from_params|srv +load_model"
        ),
    ),
    (
        Component.TRAINER,
        Phase.ROLLOUT_INIT,
        r"(?:Before|After) (?:building|init\w*) (?:the )?(?:\w+ )?(?:vllm|sglang|rollout|inference engine)",
    ),
    (Component.DRIVER, Phase.ROLLOUT, (r"Starting async evaluation|Evaluation start time|"
     r"AsyncTaskRunner: Submitted|fully-async rollout \d+: (?:target|collected)|"
     r"▶ Generating|Generating responses for|[Ss]tart(?:ing)? rollout\b|"
     r"test_gen_batch meta info|generate global step|(?:Timer |Started: ')\w*generat\w*(?: start|')|"
     r"▶ Starting validation|Running initial validation|\bstart sampling, ")),
    # ---- trainers: announcements of a phase; a completed step ends it
    (
        Component.TRAINER,
        Phase.CHECKPOINT,
        (
            r"\b[Ss]aving (?:\w+ ){0,2}(?:checkpoint|ckpt)\b|\b[Ss]aving (?:model|optimizer|full state|"
            r"HF model)\b|"
            r"\b[Ll]oading (?:\w+ )?checkpoint from|[Rr]esuming (?:training )?from checkpoint|"
            r"\b[Ss]aving (?:hf|sharded|distributed|final)\b.{0,40}\b(?:to|at)\b|\[Torch\] (?:Saving|"
            r"Loading)|"
            r"\b(?:Saving|Loading) (?:optim|extra_state|optimizer)\b|\bSaving a (?:full|model only) |"
            r"\bLoading model from \S*(?:global_step|checkpoint|ckpt)|local_global_step_folder: |"
            r"(?:Timer |Started: ')(?:save|load)_\w*(?:model|checkpoint)\w*(?: start|')|"
            r"\[Torch\] Checkpoint|Saving model checkpoint|\bsave checkpoint-|"
            r"\bLoad(?:ing)? (?:from )?(?:the )?checkpoint(?: folder)?: |\bFound checkpoint: |"
            r"^Resuming from \S*/|"
            r"\b(?:Saved|Loaded) (?:model|optim\w*) (?:to|from) \S*world_size_\d+_rank_|"
            r"\b(?:Saving|Restoring) replay buffer|"
            r"Writing (?:final )?checkpoint|Checkpoint(?:ing)? (?:at|for) step"
        ),
    ),
    (
        Component.TRAINER,
        Phase.INIT,
        (
            r"building \w+ model \.\.\.|number of parameters on \(|[Ss]etting up (?:the )?optimizer|"
            r"Creating \S+ ZeRO stage|Before (?:initializing|creating|init)\b|(?:Before|"
            r"After) initializing optimizer|"
            r"DeepSpeedZeroOptimizer_Stage\d|\[\w*stage\w*\.py:\d+:__init__\]|DeepSpeed Basic Optimizer|"
            r"Parameter Offload[: ]|Loading checkpoint shards|Loading weights: |"
            r"Applied FSDP|Applied fully_shard|(?:Before|After) (?:\w+ )?(?:FSDP|Megatron|wrap)|"
            r"[Ii]nitializing (?:the )?(?:\w+ )?(?:model|optimizer|policy)\b|Total parameters:|"
            r"loading model and peft_config|loading weights file|"
            r"Loading weights using|Loading model \S+ using|[Bb]uilding models|before model creation|"
            r"Load checkpoint from HuggingFace|Applied \w+ activation checkpointing|Wrapping optimizer|"
            r"Setting up (?:the )?(?:\w+ )?(?:model|policy)\b|\bCreating (?:\w+ )?(?:fp16|BF16|bf16) |"
            r"(?:Before|After) \w+ init$|After (?:init|load) (?:base )?model\b|After \w+ model build|"
            r"(?:Before|After) parallelize model|After offload \S+ during init|"
            r"Applied parallelism in|Applying FSDP2 with|Creat(?:ed|e) optimizer (?:in|time)\b|"
            r"Materialized and loaded weights|Model structure created on meta|engine with parallel dims|"
            r"Model creation and loading time|Model parameter count: |to create models and hf model save|"
            r"Loading the (?:base model|LoRA adapter) from|"
            r"Params for bucket \d|Number of buckets for gradient"
        ),
    ),
    (
        Component.DATA,
        Phase.DATA,
        (
            r"building (?:train|validation|test|datasets|GPT)\b.{0,40}(?:dataset|index)|"
            r"^(?:Map|Filter(?:ing)?|Tokeniz\w+|Generating (?:train|test|validation) split|"
            r"Packing)\b.{0,60}(?:%\|"
            r"|examples)|"
            r"(?:Timer |Started: ')\w*data_\w+(?: start|')|"
            r"Loading dataset|Preprocessing dataset|Tokenizing (?:train|eval) dataset"
        ),
    ),
    (Component.TRAINER, Phase.BACKWARD, r"Engine (?:after forward|before backward)\b|\bBefore backward\b"),
    (Component.TRAINER, Phase.OPTIMIZER, (r"Engine (?:after backward|before step)\b|"
                                         r"[Bb]efore optimizer step\b|"
    r"Before norm calculation|In step before checking|After norm before optimizer|"
    r"(?:Before|After) prepare optimizer sub group|(?:pre|post)-step (?:Before|After) swapping|"
    r"After optimizer before all-gather|: optimizer step\b")),
    (Component.TRAINER, Phase.LOG_PROB, (r"[Cc]omputing (?:\w+ ){0,2}log[_ ]?probs|"
    r"Preparing for (?:\w+ )?logprob|make_experience|Starting experience making|"
    r"(?:Timer |Started: ')\w*log_?probs?\w*(?: start|')")),
    (
        Component.TRAINER,
        Phase.WEIGHT_SYNC,
        (r"Weight sync: (?:pausing|pause took|transferring)|rollout paused\. cost|\[Public\]\[Pause\]|"
        r"Before resume weights|After update_weights|Update weights: +\d+%|triggering weight sync|"
        r"(?:Before|After) (?:on|off)?load_fsdp_model_to_|"
        r"Performing policy generation refit|collector before refit|Synchronizing policy weights|"
        r"[Ii]nitializ(?:ing|ed) (?:\S+ )?(?:weight update group|per-PP group)|for colocate transfer|"
        r"Preparing for refit|Refitting |[Ss]yncing (?:\w+ )?weights|[Bb]roadcasting (?:\w+ ){0,3}weights\b|"
        r"before update_weights|start broadcast model update|Preparing policy generation|"
        r"After resume (?:weights|kv_cache)|(?:Timer |Started: ')\w*(?:sync|"
        r"update)_\w*weights?\w*(?: start|')|[Uu]pdating weights|Update weights begin"),
    ),
    (
        Component.TRAINER,
        Phase.FORWARD,
        (r"Training starts at step|\*{3} Running (?:Evaluation|Prediction)|Evaluating (?:on \d|iter )|"
        r"Total (?:optimization )?steps = |(?:Timer |Started: ')\w*(?:train|policy_update)\w*(?: start|')|"
        r"▶ Training policy|Taking a training step|before the start of training step|Engine before forward|"
        r"Before (?:update|train)\w*\b|Timer (?:actor_)?train start|Running training \*|"
        r"Starting training loop"),
    ),
    (
        Component.TRAINER,
        Phase.NONE,
        (
            r"\biteration +\d+/ *\d+ *\||consumed samples|\bstep[:= ]+\d+ - |\{'loss': |'grad_norm': |"
            r"▶ Preparing (?:for training|batch)|'train_runtime'|[Ss]uccessfully saved|saved checkpoint|"
            r"Weight sync: (?:resuming|done)|sync_weights success|[Ww]eight sync complete|"
            r"After zero_optimizer step|"
            r"Training Progress:|✨ Global step \d|Experience making completed|generation refit completed|"
            r"\bstep \d+(?:/\d+)?\b.{0,40}\bloss\b|Timer \w+ end|Train epoch \["
        ),
    ),
)  # fmt: skip
_COMPILED = tuple((Stage(phase, component), Pattern(pattern)) for component, phase, pattern in _TABLE)


@lru_cache(maxsize=4096)  # every finding looks at the lines before it, mostly the same
def stage_of(line: str) -> Stage | None:
    """Return the stage that a line announces for its process; None if it announces none."""
    running = counting(line)
    for stage, pattern in _COMPILED:
        if pattern.search(line):
            return stage._replace(running=running)
    general = (bar_stage(line) if running else None) or general_stage(line)
    return None if general is None else Stage(*general, running=running)
