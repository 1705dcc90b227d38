"""What AReaL imports of SGLang to end a server."""


def kill_process_tree(*_, **__) -> None:
    """Do nothing: the server has no children."""
