"""What layers do to tokens: states, entropy, smoothness."""
