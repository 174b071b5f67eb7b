"""Follow a run while it trains: find its new steps, and deliver their changes."""
