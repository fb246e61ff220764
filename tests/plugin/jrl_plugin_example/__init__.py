"""A task, an algorithm and a buffer for jrl, found through the entry points of this package."""
