"""ASGI middleware: wraps every request, knows no route."""
