"""Seeded fault simulation: every production core, a network and a clock that a seed decides, and checkers that watch."""
