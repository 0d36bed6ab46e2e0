"""What the service does with a request, independent of HTTP."""
