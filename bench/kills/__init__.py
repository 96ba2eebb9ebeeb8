"""`make kills`: trainers, workers, fillers and the daemon, killed at random moments, over and over."""
