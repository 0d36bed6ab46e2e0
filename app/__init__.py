"""The HTTP service and the `snapkv` command; they enter the core only through `snapkv_core`."""
