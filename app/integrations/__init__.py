"""Clients of systems outside the service; each keeps its failures to itself."""
