"""Theory of depth efficiency: bounds, exact ranks and the fit of sizes."""
