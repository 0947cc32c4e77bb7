"""Serving engines that run on a folder of built kernels: what a model asks of it, and the engines' own classes.

May import `runtime` and `catalog`: a serving process loads no YAML, no templates and no formatter.
"""
