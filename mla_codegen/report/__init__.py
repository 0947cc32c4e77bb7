"""A build as one page to look at: what was decided, what the compiler made of it, what was measured.

`gather` says it as records, `highlight` and `figures` make source and pictures of it, `page` places it all in
`page.html.jinja`. May import `measure` and what that may.
"""
