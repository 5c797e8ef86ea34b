"""Model families, written once with logical axes; they know neither the mesh nor the plan."""
