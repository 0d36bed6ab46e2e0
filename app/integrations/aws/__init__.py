"""AWS services; importing this package imports none of their clients."""
