"""Bodies that go over HTTP, as pydantic models."""
