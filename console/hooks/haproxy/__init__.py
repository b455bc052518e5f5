"""Takes a node's servers out of the traffic of one or several HAProxies and gives it back, each change read back."""
