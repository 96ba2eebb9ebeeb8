"""Training processes, and the model that a loader is compared with."""
