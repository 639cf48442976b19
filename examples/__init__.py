"""Runnable examples; `python -m examples.<name>.<step>` from the repository root."""
