"""From a model's name to its backend: build.py opens, measures and builds, decide.py decides."""
