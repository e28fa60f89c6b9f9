"""Hidden states of layers, their entropy and their smoothness."""
