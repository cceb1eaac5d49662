"""What the engine tests share: an installed plugin, a tiny model, tiering on the CPU."""
