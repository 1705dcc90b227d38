"""The search for the fastest configuration: attempts as trials of an Optuna study."""
