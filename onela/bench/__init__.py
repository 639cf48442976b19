"""Measuring on the user's own machine: what `onela bench` runs, and what the scripts of the project share with it."""
