"""One file per update rule: its hyperparameters, its state, its step, and a bound on the step."""
