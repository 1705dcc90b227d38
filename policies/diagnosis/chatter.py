"""How often healthy log text may hold a string: a guess that orders strings by rarity."""

from __future__ import annotations

# Ordinary lines of the kinds that fill the logs of such jobs; only their words count.
_SAMPLE = """\
(WorkerDict pid=1) INFO:2026-01-01 10:00:00,123:Before compute_log_prob, memory allocated (GB): 1.5, memory \
reserved (GB): 2.5, device memory used/total (GB): 3.5/79.11
step:12 - actor/entropy:0.25 - actor/pg_loss:0.001 - perf/max_memory_allocated_gb:41.2 - timing_s/gen:61.0 \
response_length/mean:512.3 - training/global_step:12 - critic/score/mean:0.51 - perf/throughput:1211.4
[2026-01-01 10:00:00 TP0] Decode batch. #running-req: 12, #token: 9999, token usage: 0.25, cuda graph: True, \
gen throughput (token/s): 812.25, #queue-req: 0, mem usage=12.5 GB, available
[2026-01-01 10:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 120, #cached-token: 0
INFO worker process started on node 10.0.0.1, connection to the server is ready; initialization of \
the engine node1:1:2 [0] NCCL INFO Channel 00/02 : 0 1 2 3 via P2P/IPC; ncclCommInitRank comm ready
Rollout: 12%|##    | 12/100 [00:12<00:10, 1.2it/s] Loading checkpoint shards: 100%|####| 4/4 [00:03<00:00]
WARNING: the option is deprecated and will be removed in a future version, use the other one instead
iteration 12/ 100 | consumed samples: 512 | elapsed time per iteration (ms): 811.2 | learning rate: 1E-06 | \
lm loss: 1.2 | loss scale: 1.0 | grad norm: 0.5 | number of skipped iterations: 0
INFO: 127.0.0.1:4242 - "POST /generate HTTP/1.1" 200 OK
Let us find the number of people who have at least one of the books. We know that each student has more \
than three, so the answer is not possible if there are less than two; therefore we need to check what is \
left. The function returns an error or an exception when it is not able to process this; killing time, the \
total could be larger, and should be the same as before. It was lost when he died in the spoken \
version, which failed her.
"""
# Bits by which a character makes a string rarer where the sample does not hold it.
_WORD_BITS, _OTHER_BITS = 2.5, 4.5


def frequency(text: str) -> float:
    """Return the share of positions at which healthy text may hold `text`."""
    seen = _SAMPLE.count(text)
    return max(2.0 ** -sum(map(_bits, text)), seen / len(_SAMPLE))


def _bits(character: str) -> float:
    return _WORD_BITS if character.islower() or character == " " else _OTHER_BITS
