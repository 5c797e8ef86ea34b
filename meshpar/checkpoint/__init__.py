"""Checkpoints of the train state, through Orbax."""
