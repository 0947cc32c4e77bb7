"""The search for each shape's fastest settings, and their way back into the spec.

`space` says what may be tried, `search` chooses what to try next, `machine` tries it on the GPU in processes of its own
(`jobs`), `store` keeps what came of it, `settings` turns a winner into what the spec has to say, `edit` says it there.
"""
