"""Runs agent harnesses that know only a base URL and a key: a working copy a task, limits, tests as the reward."""
