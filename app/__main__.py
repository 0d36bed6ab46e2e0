"""Lets `python -m app` do what the `snapkv` command does."""

from app.cli import main

if __name__ == "__main__":
    main()
