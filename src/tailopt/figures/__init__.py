"""How results look: the same colour for the same algorithm in every figure."""
