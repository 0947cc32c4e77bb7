"""`Spec` -> `Plan`: every decision about every kernel, made once; the template families and their numbers.

May import `catalog`, `spec` and the dispatcher's rules in `runtime`.
"""
