"""The tests of the benches: each measures what it says."""
