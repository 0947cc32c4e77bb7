"""The commands that have a file of their own; `cli` registers them."""
