"""Everything that crosses a process boundary: ids, words, events, topics, codec and the run fold.

Nothing here does input or output. Read `topics.py` first: it names every stream of the system.
"""
