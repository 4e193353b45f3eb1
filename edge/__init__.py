"""HTTP for people: prompts in, answers out as server-sent events, from one shared fold of the token log.

Read `server.py` (the process), `submission.py` (a prompt's first three steps), `runs.py` (the fold of all runs and its fan-out),
`decisions/viewer.py` (what a viewer is shown from any cursor on) and `event_stream.py` (how it reaches the socket).
"""
