"""Measurements of the engine and of the HTTP service; ratios are taken side by side in one run."""
