"""The policy's weights on their way to the engines."""
