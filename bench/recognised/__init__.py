"""Suites of other projects, run over this one. Each is checked out or installed apart, and in an environment of its own."""
