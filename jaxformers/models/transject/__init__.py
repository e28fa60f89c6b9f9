"""TransJect: an encoder that is injective and Lipschitz by construction.

Source: "Designing Injective and Low-Entropic Transformer for Short-Long Range
Encoding", section 4.1 and 4.2, equations 4 to 8. `sigma`, `gate` and `layer`
are pure functions of arrays; `block` has the modules that own the parameters.

Differs from the authors' code, which implements a different model: U and V have
no biases; Sigma is the least-squares diagonal for the basis, not an
element-wise product; the learned Sigma is a parameter, not noise drawn in every
pass; there are no `random_features`; padding is always masked.
"""

from jaxformers.models.transject import block

__all__ = ["block"]
