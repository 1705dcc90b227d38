"""What slime, Relax and miles share: a Megatron trainer with SGLang engines."""
