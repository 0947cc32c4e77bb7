"""Whether kernels are right: the float64 reference, `verify`, the leaderboard's own calls, the Gluon emulator.

May import `publish` and what that may.
"""
