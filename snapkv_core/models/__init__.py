"""Models and tokenizers: the only place that imports transformers."""
