"""Nodes, events and readers for tests of the core."""
