"""What a caller may ask for at most, whatever else it asks."""


class OverCeilingError(Exception):
    """A known caller asks for more than it ever may.

    Attributes:
        field: Name of the field.
        requested: What was asked for.
        ceiling: The most that this caller may ask for.
    """

    def __init__(self, field: str, reason: str, *, requested: int, ceiling: int) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.requested = requested
        self.ceiling = ceiling
