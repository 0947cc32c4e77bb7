"""How fast kernels are: workloads, timing, `bench`, charts, and the search for settings in `tune`.

May import `check`, `inspect` and what those may.
"""
