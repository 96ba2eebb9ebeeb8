"""Fakes, builders and scripts that several test modules share."""
