"""The kinds of recomputation."""

from typing import Literal

# Nothing, what is inside attention, or a stage's whole forward.
Recompute = Literal[False, "attention", True]
RECOMPUTE: dict[Recompute, str] = {False: "none", "attention": "selective", True: "full"}
