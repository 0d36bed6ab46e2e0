"""Valkey, or Redis: a store of snapshots that replicas share."""
