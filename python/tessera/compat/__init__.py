"""Modules that stand in for other libraries in programs written for them."""
