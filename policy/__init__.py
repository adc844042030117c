"""The policy artifact: fingerprints, checked loading, saving, scoring, and a description in words; no vLLM in here."""
