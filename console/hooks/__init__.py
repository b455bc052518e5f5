"""Programs for the hooks of a rollout that come with Glowplug; each is a verb below ``glowplug hook``."""
