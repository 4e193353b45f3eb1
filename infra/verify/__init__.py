"""Checking what was recorded against the invariants, from the topics alone.

`verdicts` says why a record of a run did not count. `run_audit`, `account_audit` and `history_audit` take records in and keep facts;
`judgement` holds the facts against each other. None of these does input or output, so a simulator can use them on its own log.
`reading` feeds them from Kafka.
"""
