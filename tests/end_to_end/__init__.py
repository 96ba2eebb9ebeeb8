"""Tests of whole jobs: real daemons, sources and training processes."""
