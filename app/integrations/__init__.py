"""What the service uses outside itself; nothing here knows FastAPI."""
