"""A training step of an R-CNN with fixed shapes."""
