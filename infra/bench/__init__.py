"""`turnlog bench`: measured on the machine at hand, reported as lateness and as a cost per write. Never asserted in a test.

`path` measures what Turnlog adds to the time to first token, hop by hop; `deltas` how late a token reaches a client as streams grow;
`admission` how long decisions take as prompts come faster, and how soon a refusal comes when twice too many do.
"""
