"""Measurements of the engine; ratios are of figures taken side by side in one run."""
