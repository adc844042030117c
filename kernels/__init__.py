"""LoRA for the active rows of a batch: rows without an adapter cost nothing.

A step first lists its active rows in tiles (`metadata.py`), then every module calls `dispatch.add_lora`, which is two
launches: `shrink.py` (down-projection to the rank) and `expand.py` (back up, added to the base layer's output).
`reference.py` says in plain PyTorch what they mean. Import the modules themselves: importing this package must not
import Triton, which a CPU server does not need.
"""
