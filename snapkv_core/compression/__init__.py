"""Pure functions that choose which prompt tokens stay in the KV cache; they know no model."""
