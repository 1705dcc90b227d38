"""The built-in RL job: a GRPO trainer and rollout engines as Ray actors."""
