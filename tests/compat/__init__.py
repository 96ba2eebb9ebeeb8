"""Tests beside other projects: trainers over our loader, and the wheel beside other versions of its requirements."""
