"""Evaluations: generated scenes, questions about them, and accuracy on held-out ones."""
