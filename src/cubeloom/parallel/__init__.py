"""Layouts, and what follows from them."""
