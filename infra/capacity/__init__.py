"""The capacity simulator: the decision modules that production runs, over an in-memory log, a virtual clock and modelled workers.

It answers what cannot be tried on one machine: whether the laws of rationing hold at 20,000 prompts a second on 470 workers.
"""
