"""The record of a run: metrics to files, progress, a picture."""
