"""The daily cost report. It runs in a small Lambda function: no PyTorch, no web framework."""
