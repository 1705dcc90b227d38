"""What AReaL imports of SGLang to start a server."""
