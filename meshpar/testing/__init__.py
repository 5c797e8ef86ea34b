"""Support for tests, of meshpar and of models built on it."""
