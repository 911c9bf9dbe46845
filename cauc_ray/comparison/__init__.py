"""Methods side by side, at one budget and over many."""
