"""Training scripts that the tests of trainers start, with the real packages."""
