"""Losses: cross-entropy that works on split vocabularies and on pieces of the sequence."""
