"""`Plan` -> formatted source: Jinja places what the plan says, black has the last word on layout.

May import `plan` and what that may.
"""
