"""More machines than one, on Ray (extra `scale`): replicas of a server, and a model split over machines."""
