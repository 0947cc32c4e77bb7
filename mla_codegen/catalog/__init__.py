"""Facts that a spec may name: targets, micro-optimisations, what can be limited, errors that are allowed.

Tables and small records; no spec, no plan, no kernel is known here. Imports nothing of the package.
"""
