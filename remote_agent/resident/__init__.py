"""Models whose weights outlive their loader: the memory, what lies in it, and how it goes to the keeper and back."""
