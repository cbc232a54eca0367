"""Reports: what came out, for people, as pages, plots and words on a screen.

They read files and plain data (the JSON of commands) and import nothing that computes it.
"""
