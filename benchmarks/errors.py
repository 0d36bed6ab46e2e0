"""What stops a measurement."""


class BenchmarkError(Exception):
    """A figure could not be taken; the message says why in one line."""
