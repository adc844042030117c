"""Signals of decode steps, windows over a request's past, and the ordered feature schema; no vLLM in here."""
