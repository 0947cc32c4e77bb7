"""YAML -> `Spec`: the file read with its places, checked against the data model and the rules, faults in words.

May import `catalog`.
"""
