"""How displacements arise, and the one loop over rounds that serves every way."""
