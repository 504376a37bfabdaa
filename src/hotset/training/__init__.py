"""Training of sparse models: recovering a ReLU network from a dense one, and training predictors."""
