"""The parts that device backends share."""
