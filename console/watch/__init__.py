"""Keeps a recipe at a tier on chosen nodes: what is seen of a node, a pure machine for each, and who drives them."""
