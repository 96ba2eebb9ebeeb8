"""What the tests of trainers start: their own processes, with the real packages."""
