"""The version of jrl."""

__version__ = "0.1.0"
