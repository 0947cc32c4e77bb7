"""The commands: each parses, calls and prints; what a terminal shows.

May import every room; nothing imports it.
"""
