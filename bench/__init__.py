"""What Glowplug measures, against whom. In no wheel."""
