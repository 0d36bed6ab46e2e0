"""The HTTP face of the service: routes, schemas, errors."""
