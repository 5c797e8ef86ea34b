"""Whether a step depends on where it runs: two meshes compared, differences explained and shrunk."""
