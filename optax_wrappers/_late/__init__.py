"""Gradients of parameters that have since moved on."""
