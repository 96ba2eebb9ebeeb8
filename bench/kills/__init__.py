"""`make kills`: kill trainers, workers, fillers and the daemon at random moments, and audit what training saw."""
