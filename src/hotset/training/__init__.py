"""What makes a sparse model: recovering a ReLU network from a dense one, training predictors."""
