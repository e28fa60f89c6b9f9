"""Sources of examples: generators, archives, packed arrays, without JAX."""
