"""Neuron selection: modes, predictors, activation profiles, and their files."""
