"""From a name to what computes it: build.py opens, measures and builds, decide.py decides."""
