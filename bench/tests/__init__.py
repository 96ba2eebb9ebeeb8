"""Tests of the benches: each bench measures what it says."""
