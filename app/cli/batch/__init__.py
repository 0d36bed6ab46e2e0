"""`snapkv batch`: many requests of a file, answered into another one."""
