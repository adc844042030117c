"""Offline work: traces and rollouts, labels, the policy's training, thresholds with a guarantee, evaluation."""
