"""Parallel strategies as rules: each file returns a `Fragment`; `compose` merges them into the layouts of a step."""
