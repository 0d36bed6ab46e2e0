"""The engine: plan a step, run it, commit its result, tell what happened."""
