"""Sequences in folds, which ranks compute one after the other."""
