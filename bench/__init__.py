"""Benches: each measures a promise of the documents against a limit in the same run; also demo, soak and kill drill."""
