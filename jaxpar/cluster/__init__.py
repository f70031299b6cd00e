"""Compile for a target that is not here, and read the compiled program back."""
