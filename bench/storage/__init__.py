"""Reads from a disk and fills, against fio, s5cmd and cp."""
