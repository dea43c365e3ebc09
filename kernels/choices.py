"""What callers choose between. Imports nothing heavy: settings are read before torch is."""

from typing import Literal

Activations = Literal["int8", "fp32"]
"""What a product with quantised weights does to its inputs: round them by blocks, or keep them."""
