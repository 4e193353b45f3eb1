"""What the edge decides, without input or output."""
