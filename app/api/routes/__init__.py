"""One module per group of routes; each holds a router."""
