"""Fuzz targets for every parser of untrusted bytes, and their kept corpus."""
