"""Settings of the pages for people."""

from pydantic import BaseModel, Field


class PageSettings(BaseModel):
    """Which pages are served beside the API."""

    playground: bool = Field(
        True,
        description="Whether `/` is a page on which prompts can be tried out; it needs no key "
        "itself, what it asks the API does.",
    )
