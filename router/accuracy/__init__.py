"""Comparison of engines' usage reports with the predictions, and diagnosis of differences."""
