"""Real servers from packages alone: a Java runtime from PyPI, jars by Maven coordinates, both pinned."""
