"""Tier ``cached``: shards brought into the page cache and, where a recipe wants it, locked there. Touches no device."""
