"""What slime and Relax share: a Megatron trainer with SGLang engines."""
