"""Which neurons are computed: modes, predictors, activation profiles, and the files that hold them."""
