"""Tables of the frames, methods, prefixes and stage lines by which a log shows phase and component."""
