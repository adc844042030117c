"""LoRA for the active rows of a batch: rows without an adapter cost nothing."""
