"""How frameworks spell settings and figures: flags, Hydra overrides, printed dictionaries, our own lines."""
