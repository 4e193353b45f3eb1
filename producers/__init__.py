"""The write side. The only place that builds a Kafka producer.

`placement` says which key and partition an event belongs to, `log_writer` appends it, `parking` sets a bad record aside.
"""
