"""Takes the place of SGLang in front of AReaL."""
