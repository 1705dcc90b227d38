"""What AReaL imports of SGLang before it starts a server."""


def suppress_noisy_warnings() -> None:
    """Do nothing."""
