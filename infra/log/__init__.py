"""Readers of the log: `records` decodes, `tail` follows whole partitions, `span_reader` reads a closed range of offsets."""
