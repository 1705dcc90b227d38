"""A search: Optuna's study around the same attempts."""
