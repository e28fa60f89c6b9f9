"""Sources of examples: generators, archives, packed arrays. No JAX."""
