"""Training processes, fakes behind a loader, and the model that a loader is compared with."""
