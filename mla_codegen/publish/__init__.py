"""Source -> files: the generated folder with its manifest, lock and drift, and bundles of one file.

May import `render` and what that may.
"""
