"""How the software of each phase looks in a log: tables of frames, methods, prefixes and stage lines."""
